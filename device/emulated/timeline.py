"""The clock of an emulated device: an operation ends a given time after its start. Does not import torch.

Operations of several streams and processes slow each other down as on a real chip: see :func:`rates`. A timeline
runs no thread: a waiter sleeps until its operation ends and drives all streams of its process. Late wake-ups do
not add up, because an operation begins at the end of its predecessor on the stream::

    timeline = Timeline("emulated:h200:0", directory)  # the same directory in all processes on the device
    stream = timeline.stream()
    step = stream.launch(0.008, demand=Demand(compute=0.1, bandwidth=0.8))  # returns at once
    step.wait()  # until 8 ms after the launch, or after the end of the previous operation
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from device import base
from device.base import DeviceLost, check_share

#: Environment variable with the path of the file of injected faults: see :class:`Faults`.
EMULATED_FAULTS = "EPD_SERVE_EMULATED_FAULTS"
#: Longest sleep, which bounds the delay until a process's end or an injected fault is noticed.
LOOK_AGAIN_S = 0.05
#: Minimum share of compute for streams of lower priority, because a chip does not preempt running work.
_LEAST = 0.05
_SERIALS = count()
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None)
_LOCAL = threading.local()
_LOG = logging.getLogger(__name__)


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """Fraction of the device's peak that an operation uses when it runs alone."""

    compute: float = 1.0
    bandwidth: float = 1.0


WHOLE = Demand()
#: Of an operation whose use of the device is unknown: two of them, whatever their priorities, take twice as long.
UNKNOWN = Demand(compute=0.5, bandwidth=1.0)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An injected fault of one device or link."""

    slowness: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # factor on the duration of new operations
    hangs: bool = False  # no operation ends until the fault is removed
    lost: bool = False  # all work fails with DeviceLost until the process ends


class Faults:
    """Injected faults of all devices, from a JSON file, reloaded when it changes.

    It maps names to :class:`Fault`'s attributes: ``{"emulated:h200:0": {"slowness": 3.0}}``; "*" is any device.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._read_ns = path, -1
        self._faults: dict[str, Fault] = {}
        self._refresh()

    @classmethod
    def of_environment(cls) -> Faults:
        """Load the file named by the environment. Raises ValueError if it exists and is invalid."""
        path = os.environ.get(EMULATED_FAULTS)
        return cls(Path(path) if path else None)

    def of(self, name: str) -> Fault:
        try:
            self._refresh()
        except ValueError as error:
            _LOG.warning("%s; keeping the previous faults", error)
        return self._faults.get(name) or self._faults.get("*") or _NO_FAULT

    def _refresh(self) -> None:
        try:
            if self._path is None or self._path.stat().st_mtime_ns == self._read_ns:
                return
            self._read_ns = self._path.stat().st_mtime_ns
            self._faults = msgspec.json.decode(self._path.read_bytes() or b"{}", type=dict[str, Fault])
        except FileNotFoundError:
            self._faults = {}
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{EMULATED_FAULTS}={self._path}: {error}; write names of devices with slowness, hangs or lost, "
                'as in {"emulated:h200:0": {"slowness": 3.0}}'
            ) from error


_NO_FAULT = Fault()


class Running(msgspec.Struct, kw_only=True, array_like=True):
    """A running operation, as shared between all processes of the device."""

    process: tuple[int, int, int]  # pid, start, and the timeline's number in it
    stream: int = 0  # number within the timeline
    left_s: float  # time to its end if it ran alone from now on
    end_s: float = 0.0  # time of its end; 0 while it runs
    demand: Demand = WHOLE
    share: float = 1.0  # fraction of the device's compute for its process
    priority: int = 0


def rates(running: Sequence[Running]) -> list[float]:
    """Return the speed of each operation, relative to running alone on the whole device.

    A process gets its share of the compute. Streams of a lower priority number get compute before others; memory
    bandwidth is divided equally. Nothing slows down while both demands fit the device.
    """
    within = []
    for one in running:
        own = [other for other in running if other.process == one.process]
        within.append(1.0 / _scarcity(one, own, [other.demand.compute for other in own], one.share))
    compute = [one.demand.compute * part for one, part in zip(running, within, strict=True)]
    bandwidth = sum(one.demand.bandwidth * part for one, part in zip(running, within, strict=True))
    return [
        part / max(_scarcity(one, running, compute, 1.0), bandwidth)
        for one, part in zip(running, within, strict=True)
    ]


def _scarcity(one: Running, group: Sequence[Running], compute: Sequence[float], share: float) -> float:
    """Return the slowdown of ``one`` among the operations (itself included) that divide a share of compute."""
    before = sum([part for other, part in zip(group, compute, strict=True) if other.priority < one.priority])
    equal = sum([part for other, part in zip(group, compute, strict=True) if other.priority == one.priority])
    return max(1.0, equal / max(share - before, _LEAST * share))


def advance(running: Sequence[Running], from_s: float, to_s: float) -> None:
    """Advance operations from ``from_s`` to ``to_s`` and set ``end_s`` of those that end."""
    active = [one for one in running if not one.end_s]
    has_ended = True
    while active and has_ended:
        speeds = rates(active)
        ends_s = [from_s + one.left_s / speed for one, speed in zip(active, speeds, strict=True)]
        now_s = min(*ends_s, to_s)
        for one, speed, end_s in zip(active, speeds, ends_s, strict=True):
            one.left_s = max(one.left_s - speed * (now_s - from_s), 0.0)
            one.end_s = now_s if end_s <= now_s else 0.0
        has_ended = min(ends_s) <= now_s
        active = [one for one in active if not one.end_s]
        from_s = now_s


def sleep_exactly(seconds: float) -> None:
    """Sleep without Linux's default timer slack of 50 microseconds."""
    if not getattr(_LOCAL, "is_exact", False):
        _LOCAL.is_exact = True
        _LIBC.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    time.sleep(seconds)


class Timeline:
    """One device, or one link, as seen by this process. Thread-safe.

    Args:
        directory: holds the file shared by all processes on the device; None: this process is alone.
        clock: seconds, the same in all processes.

    Attributes:
        share: fraction of the device's compute for this process.
        lock: guards all streams, because one may wait for another.
    """

    def __init__(
        self,
        name: str,
        directory: str | Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_exactly,
    ) -> None:
        self.name, self.share = name, 1.0
        self.clock, self.sleep = clock, sleep
        self.lock = threading.RLock()
        self._faults = Faults.of_environment()
        self._is_lost = False
        self._process = os.getpid(), _born(os.getpid()) or 0, next(_SERIALS)
        self._checked_s = -math.inf
        self._numbers = count()
        self.streams: weakref.WeakSet[TimelineStream] = weakref.WeakSet()
        self._ended: deque[int] = deque()  # numbers of garbage-collected streams; no lock here
        self._board = _Board(None if directory is None else Path(directory, f"{name}.timeline"))

    def stream(self, priority: int = 0, share: float | None = None) -> TimelineStream:
        """Return a queue of operations; lower priority numbers are served first.

        ``share``: limit on its fraction of the process's compute; None: no limit.
        """
        if share is not None:
            check_share(share, 0.0)
        stream = TimelineStream(self, priority, next(self._numbers), share)
        weakref.finalize(stream, self._ended.append, stream.number).atexit = False
        with self.lock:
            self.streams.add(stream)
        return stream

    def check(self) -> Fault:
        """Return the device's current fault. Raises DeviceLost."""
        fault = self._faults.of(self.name)
        if fault.lost or self._is_lost:
            self._is_lost = True
            raise DeviceLost(f"{self.name} is lost: launched work will never finish")
        return fault

    def begin(self, operation: Operation, stream: TimelineStream) -> None:
        """Start an operation on the device; ``operation.begin_s`` is now or slightly earlier."""
        row = Running(
            process=self._process,
            stream=stream.number,
            left_s=operation.cost_s * self.check().slowness,
            demand=operation.demand,
            share=self.share,
            priority=stream.priority,
        )
        with self._now() as (now_s, rows):
            others = [copy(one) for one in rows if not one.end_s]
            advance([*others, row], operation.begin_s, now_s)
            rows.append(row)

    def poll(self, stream: TimelineStream) -> tuple[bool, float]:
        """Return whether a stream's operation has ended, and its end time or the current estimate."""
        with self._now() as (now_s, rows):
            own = next(one for one in rows if (one.process, one.stream) == (self._process, stream.number))
            if own.end_s:
                rows.remove(own)
                return True, own.end_s
            own = copy(own)
            others = [copy(one) for one in rows if one.stream != own.stream or one.process != own.process]
            advance([own, *others], now_s, math.inf)
            return False, own.end_s

    @contextmanager
    def _now(self) -> Iterator[tuple[float, list[Running]]]:
        """Yield the current operations of all live processes, and write them back at the end."""
        with self._board.opened() as (at_s, rows):
            now_s = max(self.clock(), at_s)
            advance(rows, at_s, now_s)
            while self._ended:
                number = self._ended.popleft()
                rows[:] = [one for one in rows if (one.process, one.stream) != (self._process, number)]
            if now_s - self._checked_s >= LOOK_AGAIN_S:
                self._checked_s = now_s
                others = {one.process[:2] for one in rows} - {self._process[:2]}
                if dead := {(pid, born) for pid, born in others if _born(pid) != born}:
                    rows[:] = [one for one in rows if one.process[:2] not in dead]
            yield now_s, rows
            self._board.write(now_s, rows)


class Operation:
    """Work on a stream, created by :meth:`TimelineStream.launch`.

    Attributes:
        cost_s: seconds if it runs alone.
        begin_s, end_s: exact times on the timeline's clock; waiters wake slightly later. ``end_s`` is NaN before
            the end.
    """

    __slots__ = ("begin_s", "cost_s", "demand", "end_s", "is_done", "stream", "then")

    def __init__(
        self,
        stream: TimelineStream,
        cost_s: float,
        demand: Demand,
        launched_s: float,
        then: Callable[[], object] | None,
    ) -> None:
        self.stream, self.cost_s, self.demand, self.then = stream, cost_s, demand, then
        self.begin_s, self.end_s = launched_s, math.nan
        self.is_done = False

    def query(self) -> bool:
        """Return whether it is done, without waiting. Raises DeviceLost."""
        self.stream.drive(self)
        return self.is_done

    def wait(self) -> None:
        """Sleep until it is done. Raises DeviceLost."""
        timeline = self.stream.timeline
        while True:
            end_s = self.stream.drive(self)
            with timeline.lock:  # begin the next operation of each stream
                for stream in list(timeline.streams):
                    if stream.has_next:
                        end_s = min(end_s, stream.drive())
            if self.is_done:
                return
            timeline.sleep(max(min(end_s - timeline.clock(), LOOK_AGAIN_S), 0.0))


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Event protocol on an operation; None: the stream was idle."""

    operation: Operation | None

    def query(self) -> bool:
        return self.operation is None or self.operation.query()

    def synchronize(self) -> None:
        if self.operation is not None:
            self.operation.wait()


def entered_streams() -> list[TimelineStream]:
    """Return the streams entered by this thread, the innermost last."""
    streams: list[TimelineStream] = _LOCAL.__dict__.setdefault("streams", [])
    return streams


class TimelineStream:
    """Stream protocol: queue of consecutive operations, created by :meth:`Timeline.stream`. Thread-safe."""

    def __init__(self, timeline: Timeline, priority: int, number: int, share: float | None = None) -> None:
        self.timeline, self.priority, self.number, self.share = timeline, priority, number, share
        self._queue: deque[Operation | _Barrier] = deque()
        self._has_begun = self._has_hung = False  # state of the first operation in the queue
        self._last: Operation | None = None  # the last one launched, until it is done
        self._free_s = -math.inf  # end of the previous operation

    def launch(
        self,
        cost_s: float,
        then: Callable[[], object] | None = None,
        *,
        demand: Demand = WHOLE,
    ) -> Operation:
        """Launch work that takes ``cost_s`` seconds alone on the device. Returns at once.

        Args:
            then: called when the work is done, under the timeline's lock, on any thread that waits on the timeline
                or queries this stream.

        Raises DeviceLost, and ValueError for a negative or non-finite cost.
        """
        if not 0 <= cost_s < math.inf:
            raise ValueError(f"an operation of {cost_s} s on {self.timeline.name}: must be at least 0 s")
        with self.timeline.lock:
            self.timeline.check()
            if self.share is not None:
                slower = max(1.0, demand.compute / (self.share * self.timeline.share))
                cost_s *= slower
                demand = Demand(demand.compute / slower, demand.bandwidth / slower)
            operation = Operation(self, cost_s, demand, self.timeline.clock(), then)
            self._last = operation
            self._queue.append(operation)
            if self._queue[0] is operation:
                self._begin(operation)
        return operation

    def wait_event(self, event: base.Event) -> None:
        """Delay work launched from now on until after the event of any stream of the timeline."""
        assert isinstance(event, TimedEvent)
        if event.operation is not None:
            with self.timeline.lock:
                self._queue.append(_Barrier(event.operation))

    def record_event(self) -> TimedEvent:
        return TimedEvent(self._last)

    def __enter__(self) -> Self:
        entered_streams().append(self)
        return self

    def __exit__(self, *error: object) -> None:
        entered_streams().pop()

    def synchronize(self) -> None:
        """Sleep until all launched work is done. Raises DeviceLost."""
        with self.timeline.lock:
            last = self._queue[-1] if self._queue else None
        if last is not None:
            (last.other if isinstance(last, _Barrier) else last).wait()
            self.drive()

    @property
    def has_next(self) -> bool:
        """True if another operation follows the current one."""
        return len(self._queue) > 1

    def drive(self, until: Operation | None = None) -> float:
        """Advance the stream to the present. Returns the estimated end of its current operation."""
        with self.timeline.lock:
            while self._queue and not (until is not None and until.is_done):
                head = self._queue[0]
                if isinstance(head, _Barrier):
                    end_s = head.other.stream.drive(head.other)
                    if not head.other.is_done:
                        return end_s
                    self._free_s = max(self._free_s, head.other.end_s)
                    self._queue.popleft()
                    continue
                if not self._has_begun:
                    self._begin(head)
                if self.timeline.check().hangs:
                    self._has_hung = True
                    return math.inf
                is_done, end_s = self.timeline.poll(self)
                if not is_done:
                    return end_s
                if self._has_hung:
                    end_s = max(end_s, self.timeline.clock())
                self._queue.popleft()
                self._has_begun = self._has_hung = False
                self._free_s = head.end_s = end_s
                head.is_done = True
                if self._last is head:
                    self._last = None
                if head.then is not None:
                    head.then()
            return self._free_s

    def _begin(self, head: Operation) -> None:
        head.begin_s = max(head.begin_s, self._free_s)
        self.timeline.begin(head, self)
        self._has_begun = True


@dataclass(frozen=True, slots=True)
class _Barrier:
    """A queue entry that waits for an operation of another stream."""

    other: Operation


_Rows = tuple[float, list[Running]]


class _Board:
    """Operations of a device in shared memory, double-buffered.

    The first byte selects the valid half: a process killed during a write leaves the other half intact.
    """

    _HALF_BYTES = 1 << 17

    def __init__(self, path: Path | None) -> None:
        self._file: int | None = None
        size = 1 + 2 * self._HALF_BYTES
        self._memory: Any = bytearray(size)
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)

    @contextmanager
    def opened(self) -> Iterator[_Rows]:
        """Yield the time of the state, and the operations, under a lock between processes."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # the kernel releases it when a process dies
        try:
            at = 1 + self._memory[0] * self._HALF_BYTES
            length = int.from_bytes(self._memory[at : at + 4])
            yield (
                msgspec.msgpack.decode(self._memory[at + 4 : at + 4 + length], type=_Rows) if length else (0.0, [])
            )
        finally:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def write(self, at_s: float, rows: Sequence[Running]) -> None:
        """Write the state; call it inside :meth:`opened`."""
        data = msgspec.msgpack.encode((at_s, rows))
        half = 1 - self._memory[0]
        at = 1 + half * self._HALF_BYTES
        self._memory[at : at + 4 + len(data)] = len(data).to_bytes(4) + data
        self._memory[0] = half


def _born(pid: int) -> int | None:
    """Return the start time of a process, which tells reused pids apart; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
