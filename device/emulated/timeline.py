"""The time of an emulated device: work on a stream is done so many seconds after its start. No torch in here.

Operations of several streams and processes on one device slow each other down as on a chip: see :func:`rates`. A
timeline has no thread: whoever waits for an operation sleeps until its end, and drives all streams of its process
meanwhile. Late wake-ups do not add up, since an operation begins where the one before it on its stream has ended::

    timeline = Timeline("emulated:h200:0", directory)  # the same directory in all processes on the device
    stream = timeline.stream()
    step = stream.launch(0.008, demand=Demand(compute=0.1, bandwidth=0.8))  # returns at once
    step.wait()  # until 8 ms after the launch, or after the end of the operation before
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
from typing import Annotated, Any

import msgspec

from device.base import DeviceLost
from device.shares import check_share

#: The variable that names the file of injected faults: see :class:`Faults`.
EMULATED_FAULTS = "EPD_SERVE_EMULATED_FAULTS"
#: A sleep is at most this long: so soon are a process's end and an injected fault noticed.
LOOK_AGAIN_S = 0.05
#: The part of the arithmetic that streams of lower priority get at least: work that runs is not taken off a chip.
_LEAST = 0.05
_SERIALS = count()
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None)
_LOCAL = threading.local()
_LOG = logging.getLogger(__name__)


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """The part of its device's peak that an operation uses while it is alone there."""

    compute: float = 1.0
    bandwidth: float = 1.0


WHOLE = Demand()


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An injected fault of one device or link."""

    slowness: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # operations that begin take so many times as long
    hangs: bool = False  # no operation is done until this is taken back
    lost: bool = False  # all work fails with DeviceLost, for the rest of a process's life


class Faults:
    """Injected faults of all devices, from a JSON file that is read again when it changes.

    It maps names to :class:`Fault`'s attributes: ``{"emulated:h200:0": {"slowness": 3.0}}``; "*" is any device.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._read_ns = path, -1
        self._faults: dict[str, Fault] = {}
        self._refresh()

    @classmethod
    def of_environment(cls) -> Faults:
        """Raises ValueError where the variable's file is there and cannot be understood."""
        path = os.environ.get(EMULATED_FAULTS)
        return cls(Path(path) if path else None)

    def of(self, name: str) -> Fault:
        try:
            self._refresh()
        except ValueError as error:
            _LOG.warning("%s; the faults before go on", error)
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
    """An operation on the device, as all its processes see it."""

    process: tuple[int, int, int]  # pid, start, and the timeline's number in it
    stream: int = 0  # its number in the timeline
    left_s: float  # to its end, were it alone from now on
    end_s: float = 0.0  # the time of its end; 0 while it runs
    demand: Demand = WHOLE
    share: float = 1.0  # part of the device's arithmetic that its process may have
    priority: int = 0


def rates(running: Sequence[Running]) -> list[float]:
    """Return the speed of each operation; 1: as if it were alone on a device that is all its own.

    A process gets its share of the arithmetic. Streams of a lower priority number get arithmetic before others;
    the memory's bandwidth is divided equally. Nothing slows down while the demands for each fit the device.
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


def _scarcity(one: Running, beside: Sequence[Running], compute: Sequence[float], share: float) -> float:
    """The factor by which ``one``, itself among those that divide a share of the arithmetic, is slower."""
    before = sum([part for other, part in zip(beside, compute, strict=True) if other.priority < one.priority])
    equal = sum([part for other, part in zip(beside, compute, strict=True) if other.priority == one.priority])
    return max(1.0, equal / max(share - before, _LEAST * share))


def advance(running: Sequence[Running], from_s: float, to_s: float) -> None:
    """Bring operations from their state at ``from_s`` to that at ``to_s``; those that end until then say when."""
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
    """Sleep without the 50 microseconds by which Linux otherwise lets a thread's timers be late."""
    if not getattr(_LOCAL, "is_exact", False):
        _LOCAL.is_exact = True
        _LIBC.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    time.sleep(seconds)


class Timeline:
    """One device, or one link, as this process sees it. Thread-safe.

    Args:
        directory: holds the file that all processes on the device share; None: this process is alone on it.
        faults: None: those of the environment.
        clock: seconds, the same in all processes.

    Attributes:
        share: part of the device's arithmetic that this process may have.
        lock: of all its streams, since one may wait for another.
    """

    def __init__(
        self,
        name: str,
        directory: str | Path | None = None,
        *,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_exactly,
    ) -> None:
        self.name, self.share = name, 1.0
        self.clock, self.sleep = clock, sleep
        self.lock = threading.RLock()
        self.faults = faults or Faults.of_environment()
        self._is_lost = False
        self._process = os.getpid(), _born(os.getpid()) or 0, next(_SERIALS)
        self._checked_s = -math.inf
        self._numbers = count()
        self._streams: weakref.WeakSet[TimelineStream] = weakref.WeakSet()
        self._ended: deque[int] = deque()  # streams; they may end at any place of a thread
        self._board = _Board(None if directory is None else Path(directory, f"{name}.timeline"))

    def stream(self, priority: int = 0, share: float | None = None) -> TimelineStream:
        """A queue of operations; one of a lower priority number is served first.

        ``share``: part of the process's arithmetic to which they keep; None: no limit.
        """
        if share is not None:
            check_share(share, 0.0)
        stream = TimelineStream(self, priority, next(self._numbers), share)
        weakref.finalize(stream, self._ended.append, stream.number).atexit = False
        with self.lock:
            self._streams.add(stream)
        return stream

    def check(self) -> Fault:
        """The injected fault that the device has now. Raises DeviceLost."""
        fault = self.faults.of(self.name)
        if fault.lost or self._is_lost:
            self._is_lost = True
            raise DeviceLost(f"{self.name} is lost: nothing that was launched there will be done")
        return fault

    def drive_queues(self) -> float:
        """Begin what is next on each stream. Returns when that is to be done again."""
        with self.lock:
            return min([stream.drive() for stream in list(self._streams) if stream.has_next], default=math.inf)

    def begin(self, operation: Operation, stream: TimelineStream) -> None:
        """Put an operation on the device; ``operation.begin_s`` is now or a little earlier."""
        row = Running(
            process=self._process,
            stream=stream.number,
            left_s=operation.cost_s * self.check().slowness,
            demand=operation.demand,
            share=self.share,
            priority=stream.priority,
        )
        with self._now() as (now_s, rows):
            beside = [copy(one) for one in rows if not one.end_s]
            advance([*beside, row], operation.begin_s, now_s)
            rows.append(row)

    def poll(self, stream: TimelineStream) -> tuple[bool, float]:
        """Whether a stream's operation has ended, and when it did, or will as far as is known."""
        with self._now() as (now_s, rows):
            own = next(one for one in rows if (one.process, one.stream) == (self._process, stream.number))
            if own.end_s:
                rows.remove(own)
                return True, own.end_s
            own = copy(own)
            beside = [copy(one) for one in rows if one.stream != own.stream or one.process != own.process]
            advance([own, *beside], now_s, math.inf)
            return False, own.end_s

    @contextmanager
    def _now(self) -> Iterator[tuple[float, list[Running]]]:
        """The operations of all processes that live, as they are now; at the end they are written back."""
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
    """Work on a stream; :meth:`TimelineStream.launch` makes it.

    Attributes:
        cost_s: seconds that it takes alone.
        begin_s, end_s: on the timeline's clock, as the device has them: whoever waits is back a little later.
            ``end_s`` is NaN before the end.
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
        """Whether it is done, without waiting. Raises DeviceLost."""
        self.stream.drive(self)
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until it is done, or for ``timeout_s``; returns whether it is done. Raises DeviceLost."""
        timeline = self.stream.timeline
        give_up_s = math.inf if timeout_s is None else timeline.clock() + timeout_s
        while True:
            end_s = min(self.stream.drive(self), timeline.drive_queues())
            now_s = timeline.clock()
            if self.is_done or now_s >= give_up_s:
                return self.is_done
            timeline.sleep(max(min(end_s - now_s, give_up_s - now_s, LOOK_AGAIN_S), 0.0))


class TimelineStream:
    """Operations done one after another; :meth:`Timeline.stream` makes it. Thread-safe."""

    def __init__(self, timeline: Timeline, priority: int, number: int, share: float | None = None) -> None:
        self.timeline, self.priority, self.number, self.share = timeline, priority, number, share
        self._queue: deque[Operation | _Barrier] = deque()
        self._has_begun = self._has_hung = False  # the queue's first operation
        self._free_s = -math.inf  # the end of the operation before it

    def launch(
        self,
        cost_s: float,
        then: Callable[[], object] | None = None,
        *,
        demand: Demand = WHOLE,
    ) -> Operation:
        """Give it work that takes ``cost_s`` seconds where it is alone on the device. Returns at once.

        Args:
            then: called when the work is done, under the timeline's lock, on whichever thread waits for work of
                the timeline or asks about this stream.

        Raises DeviceLost, and ValueError for a cost that is no number of seconds.
        """
        if not 0 <= cost_s < math.inf:
            raise ValueError(f"an operation of {cost_s} s on {self.timeline.name}: it takes 0 s or more")
        with self.timeline.lock:
            self.timeline.check()
            if self.share is not None:
                slower = max(1.0, demand.compute / (self.share * self.timeline.share))
                cost_s *= slower
                demand = Demand(demand.compute / slower, demand.bandwidth / slower)
            operation = Operation(self, cost_s, demand, self.timeline.clock(), then)
            self._queue.append(operation)
            if self._queue[0] is operation:
                self._begin(operation)
        return operation

    def wait_for(self, operation: Operation) -> None:
        """Let work that is launched from now on begin after ``operation``, of any stream of the timeline."""
        with self.timeline.lock:
            self._queue.append(_Barrier(operation))

    def synchronize(self) -> None:
        """Sleep until all that was launched is done. Raises DeviceLost."""
        with self.timeline.lock:
            last = self._queue[-1] if self._queue else None
        if last is not None:
            (last.other if isinstance(last, _Barrier) else last).wait()
            self.drive()

    @property
    def has_next(self) -> bool:
        """Whether something is to begin after the present operation."""
        return len(self._queue) > 1

    def drive(self, until: Operation | None = None) -> float:
        """Bring the stream to the present. Returns when its present operation ends, as far as is known."""
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
                if head.then is not None:
                    head.then()
            return self._free_s

    def _begin(self, head: Operation) -> None:
        head.begin_s = max(head.begin_s, self._free_s)
        self.timeline.begin(head, self)
        self._has_begun = True


@dataclass(frozen=True, slots=True)
class _Barrier:
    """A stream goes on after another's operation."""

    other: Operation


_Rows = tuple[float, list[Running]]


class _Board:
    """The operations of a device in memory that its processes share, written to either half in turn.

    The first byte names the half that is whole: a process that is killed while it writes leaves the other one.
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
        """The time of the state, and the operations; no other process sees or changes them meanwhile."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # the kernel takes it from a process that dies
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
        """Write the state, inside :meth:`opened`."""
        data = msgspec.msgpack.encode((at_s, rows))
        half = 1 - self._memory[0]
        at = 1 + half * self._HALF_BYTES
        self._memory[at : at + 4 + len(data)] = len(data).to_bytes(4) + data
        self._memory[0] = half


def _born(pid: int) -> int | None:
    """The kernel's time of a process's start, which tells it from a later one of its number; None: it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
