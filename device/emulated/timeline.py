"""The time of an emulated device: work on a stream is done so many seconds after its start. No torch in here.

Operations of several streams and processes on one device slow each other down as on a chip: see :func:`rates`. A
timeline has no thread: whoever waits for an operation sleeps until its end, and drives all streams of its process
meanwhile. Late wake-ups do not add up, since an
operation begins where the one before it on its stream has ended, and not when a thread has noticed that::

    timeline = Timeline("emulated:h200:0", directory)  # the same directory in all processes on the device
    stream = timeline.stream()
    step = stream.launch(0.008, demand=Demand(compute=0.1, bandwidth=0.8))  # returns at once
    step.wait()  # until 8 ms after the launch, or after the end of the operation before
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import math
import mmap
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from device.base import DeviceLost
from device.shares import check_share

#: The variable that names the file of injected faults: see :class:`Faults`.
EMULATED_FAULTS = "EPD_SERVE_EMULATED_FAULTS"
#: A sleep is at most this long: so soon are a process's end and an injected fault noticed.
LOOK_AGAIN_S = 0.05
#: The part of the arithmetic that streams of lower priority get at least: work that runs is not taken off a chip.
_LEAST = 0.05
_HEAD = struct.Struct("<qd")  # the number of rows, the time of their state
_ROW = struct.Struct("<qqqqdddddq8s")
_MAX_ROWS = 1024
_SERIALS = count()
_PR_SET_TIMERSLACK = 29
_LIBC = ctypes.CDLL(None)
_LOCAL = threading.local()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The part of its device that an operation uses while it is alone there.

    Attributes:
        compute, bandwidth: part of the peak.
        stage: its kind for measured interference, such as "E", "P", "D"; 8 letters at most, "" for none.
    """

    compute: float = 1.0
    bandwidth: float = 1.0
    stage: str = ""


WHOLE = Demand()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An injected fault of one device or link.

    Attributes:
        slowness: operations that begin take so many times as long.
        hangs: no operation is done until this is taken back.
        lost: all work fails with :class:`~device.base.DeviceLost`, for the rest of a process's life.
    """

    slowness: float = 1.0
    hangs: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.slowness < math.inf:
            raise ValueError(
                f"slowness {self.slowness}: write a number above 0, such as 3.0 for three times as long"
            )


class Faults:
    """Injected faults of all devices, from a JSON file that is read again when it changes.

    It maps names to :class:`Fault`'s attributes: ``{"emulated:h200:0": {"slowness": 3.0}}``; "*" is any device.
    An empty file has no faults, as one that is being written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read_ns = -1
        self._faults: dict[str, Fault] = {}
        if path is not None:
            self._refresh()

    @classmethod
    def of_environment(cls) -> Faults:
        """Raises ValueError where the variable's file is there and cannot be understood."""
        path = os.environ.get(EMULATED_FAULTS)
        return cls(Path(path) if path else None)

    def of(self, name: str) -> Fault:
        if self._path is not None:
            try:
                self._refresh()
            except ValueError as error:
                _LOG.warning("%s; the faults before go on", error)
        return self._faults.get(name) or self._faults.get("*") or _NO_FAULT

    def _refresh(self) -> None:
        assert self._path is not None
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns == self._read_ns:
                return
            self._read_ns = changed_ns
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._faults = {}
            return
        try:
            self._faults = {name: Fault(**fault) for name, fault in json.loads(text or "{}").items()}
        except (ValueError, TypeError, AttributeError) as error:
            known = ", ".join(one.name for one in fields(Fault))
            raise ValueError(
                f"{EMULATED_FAULTS}={self._path}: {error}; write the names of devices with {known}, as in "
                '{"emulated:h200:0": {"slowness": 3.0}}'
            ) from error


_NO_FAULT = Fault()


@dataclass(kw_only=True, slots=True)
class Running:
    """An operation on the device, as all its processes see it.

    Attributes:
        process: pid, start, and the timeline's number in it. stream: its number in the timeline.
        left_s: seconds to its end, were it alone from now on.
        end_s: the time of its end; 0 while it runs.
        share: part of the device's arithmetic that its process may have.
    """

    process: tuple[int, int, int]
    left_s: float
    demand: Demand = WHOLE
    end_s: float = 0.0
    share: float = 1.0
    priority: int = 0
    stream: int = 0


def rates(running: Sequence[Running], interference: Mapping[tuple[str, str], float]) -> list[float]:
    """The speed of each operation; 1: as if it were alone on a device that is all its own.

    A process gets its share of the arithmetic. Streams of a lower priority number get arithmetic before others;
    the memory's bandwidth is divided equally. Nothing slows down while the demands for each fit the device.
    Stages that were measured side by side slow each other by ``interference`` instead: ("E", "P") is the share by
    which E takes longer beside P; increases of several neighbours add up.
    """
    within = []
    for one in running:
        own = [other for other in running if other.process == one.process]
        within.append(1.0 / _scarcity(one, own, [other.demand.compute for other in own], one.share))
    speeds = []
    for place, one in enumerate(running):
        longer, beside, compute, bandwidth = 1.0, list[Running](), list[float](), 0.0
        for other_place, other in enumerate(running):
            increase = interference.get((one.demand.stage, other.demand.stage))
            if place != other_place and increase is not None:
                longer += increase
            else:
                beside.append(other)
                compute.append(other.demand.compute * within[other_place])
                bandwidth += other.demand.bandwidth * within[other_place]
        speeds.append(within[place] / (max(_scarcity(one, beside, compute, 1.0), bandwidth) * longer))
    return speeds


def _scarcity(one: Running, beside: Sequence[Running], compute: Sequence[float], share: float) -> float:
    """The factor by which ``one``, itself among those that divide a share of the arithmetic, is slower."""
    before = sum([part for other, part in zip(beside, compute, strict=True) if other.priority < one.priority])
    equal = sum([part for other, part in zip(beside, compute, strict=True) if other.priority == one.priority])
    return max(1.0, equal / max(share - before, _LEAST * share))


def advance(
    running: Sequence[Running], from_s: float, to_s: float, interference: Mapping[tuple[str, str], float]
) -> None:
    """Bring operations from their state at ``from_s`` to that at ``to_s``; those that end until then say when."""
    active = [one for one in running if not one.end_s]
    has_ended = True
    while active and has_ended:
        speeds = rates(active, interference)
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
        interference: see :func:`rates`; the same in all processes.
        faults: None: those of the environment.
        clock: seconds, the same in all processes.

    Attributes:
        share: part of the device's arithmetic that this process may have.
        interference, faults: as above; they may be set later.
        lock: of all its streams, since one may wait for another.
    """

    def __init__(
        self,
        name: str,
        directory: str | Path | None = None,
        *,
        interference: Mapping[tuple[str, str], float] | None = None,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_exactly,
    ) -> None:
        self.name, self.share = name, 1.0
        self.clock, self.sleep = clock, sleep
        self.lock = threading.RLock()
        self.interference = dict(interference or {})
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

    # ------------------------------------------------------------------ called by streams, which hold the lock

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
            beside = [replace(one) for one in rows if not one.end_s]
            advance([*beside, row], operation.begin_s, now_s, self.interference)
            rows.append(row)

    def poll(self, stream: TimelineStream) -> tuple[bool, float]:
        """Whether a stream's operation has ended, and when it did, or will as far as is known."""
        with self._now() as (now_s, rows):
            own = next(one for one in rows if (one.process, one.stream) == (self._process, stream.number))
            if own.end_s:
                rows.remove(own)
                return True, own.end_s
            own = replace(own)
            beside = [replace(one) for one in rows if one.stream != own.stream or one.process != own.process]
            advance([own, *beside], now_s, math.inf, self.interference)
            return False, own.end_s

    @contextmanager
    def _now(self) -> Iterator[tuple[float, list[Running]]]:
        """The operations of all processes that live, as they are now; at the end they are written back."""
        with self._board.opened() as (at_s, rows):
            now_s = max(self.clock(), at_s)
            advance(rows, at_s, now_s, self.interference)
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
        launched_s: float | None = None,
    ) -> Operation:
        """Give it work that takes ``cost_s`` seconds where it is alone on the device. Returns at once.

        Args:
            then: called when the work is done, under the timeline's lock, on whichever thread waits for work of
                the timeline or asks about this stream.
            launched_s: None: now; else a time before, at which the host has launched it.

        Raises DeviceLost, and ValueError for a cost that is no number of seconds.
        """
        if not 0 <= cost_s < math.inf:
            raise ValueError(f"an operation of {cost_s} s on {self.timeline.name}: it takes 0 s or more")
        with self.timeline.lock:
            self.timeline.check()
            at_s = self.timeline.clock() if launched_s is None else launched_s
            if self.share is not None:
                slower = max(1.0, demand.compute / (self.share * self.timeline.share))
                cost_s *= slower
                demand = replace(demand, compute=demand.compute / slower, bandwidth=demand.bandwidth / slower)
            operation = Operation(self, cost_s, demand, at_s, then)
            self._queue.append(operation)
            if self._queue[0] is operation:
                self._begin(operation)
        return operation

    def wait_for(self, operation: Operation) -> None:
        """Let work that is launched from now on begin after ``operation``, of any stream of the timeline."""
        with self.timeline.lock:
            self._queue.append(_Barrier(operation))

    def delay(self, until_s: float) -> None:
        """Let what is launched next begin no earlier than ``until_s``: the host was slower than the device."""
        with self.timeline.lock:
            self._free_s = max(self._free_s, until_s)

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


class _Board:
    """The operations of a device in memory that its processes share."""

    def __init__(self, path: Path | None) -> None:
        size = _HEAD.size + _MAX_ROWS * _ROW.size
        self._file: int | None = None
        self._memory: Any = bytearray(size)
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)

    @contextmanager
    def opened(self) -> Iterator[tuple[float, list[Running]]]:
        """The time of the state, and the operations; no other process sees or changes them meanwhile."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # the kernel takes it from a process that dies
        try:
            number, at_s = _HEAD.unpack_from(self._memory)
            rows = []
            for place in range(number):
                pid, born, serial, stream, left_s, end_s, compute, bandwidth, share, priority, stage = (
                    _ROW.unpack_from(self._memory, _HEAD.size + place * _ROW.size)
                )
                rows.append(
                    Running(
                        process=(pid, born, serial),
                        stream=stream,
                        left_s=left_s,
                        end_s=end_s,
                        demand=Demand(
                            compute=compute, bandwidth=bandwidth, stage=stage.rstrip(b"\0").decode("ascii")
                        ),
                        share=share,
                        priority=priority,
                    )
                )
            yield at_s, rows
        finally:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def write(self, at_s: float, rows: Sequence[Running]) -> None:
        """Inside :meth:`opened`. The number comes last: whoever is killed here leaves rows that can be read."""
        for place, one in enumerate(rows):
            _ROW.pack_into(
                self._memory,
                _HEAD.size + place * _ROW.size,
                *one.process,
                one.stream,
                one.left_s,
                one.end_s,
                one.demand.compute,
                one.demand.bandwidth,
                one.share,
                one.priority,
                one.demand.stage.encode("ascii"),
            )
        _HEAD.pack_into(self._memory, 0, len(rows), at_s)


def _born(pid: int) -> int | None:
    """The kernel's time of a process's start, which tells it from a later one of its number; None: it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
