"""An accelerator's memory, streams and events without the chip.

A launch returns at once: a thread for each stream does one after another.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch

from device import base
from device.base import DeviceLost
from device.registry import BACKENDS
from device.transport import TRANSPORTS, TransportCapability

TYPE = "chip"
CAPABILITY = TransportCapability(mooncake_protocols=("tcp", "rdma"), device_protocols=("tcp", "rdma"))
BACKENDS[TYPE], TRANSPORTS[TYPE] = "chip.accelerator", CAPABILITY
_LOCAL = threading.local()


class ChipMemoryError(torch.OutOfMemoryError):
    """The chip's memory is full; torch's own error of an accelerator."""


class Memory:
    """The memory of one chip, in bytes. Thread-safe."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.fraction = name, total, 1.0
        self.peak = self._used = 0
        self._ended: deque[int] = deque()  # bytes of what has ended; that may happen at any place of a thread
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        with self._lock:
            return self._settled()

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self, num_bytes: int) -> Block:
        with self._lock:
            used = self._settled()
            free = int(self.total * self.fraction) - used
            if num_bytes > free:
                raise ChipMemoryError(
                    f"chip out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB on {self.name}, of "
                    f"whose {self.total / 2**20:.0f} MiB {free / 2**20:.2f} are free"
                )
            self._used = used + num_bytes
            self.peak = max(self.peak, self._used)
        block = Block()
        weakref.finalize(block, self._ended.append, num_bytes).atexit = False
        return block

    def _settled(self) -> int:
        while self._ended:
            self._used -= self._ended.popleft()
        return self._used


class Block:
    """A piece of a device's memory; it is free when no tensor and no launched work refers to it."""

    __slots__ = ("__weakref__",)


class Chip:
    """One chip of this process: its memory and its default stream.

    Attributes:
        launch_s: seconds by which the chip lengthens each launch.
        num_launches: operators, copies and graphs that were launched so far.
        num_replays: replays of graphs by their size.
        goes_on: cleared, no work is done until it is set again.
        is_lost: whether all work fails from now on.
    """

    def __init__(self, index: int, memory_bytes: int) -> None:
        self.index = index
        self.memory = Memory(f"{TYPE}:{index}", memory_bytes)
        self.launch_s, self.num_launches, self.is_lost = 0.0, 0, False
        self.num_replays: Counter[int] = Counter()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.making = threading.Lock()
        self.default = Stream(self)

    def check(self) -> None:
        """Raises DeviceLost."""
        if self.is_lost:
            raise DeviceLost(f"{self.memory.name} is lost: nothing that was launched there will be done")

    def current(self) -> Stream:
        entered: list[Stream] = getattr(_LOCAL, "streams", [])
        return next((stream for stream in reversed(entered) if stream.chip is self), self.default)

    def activate(self) -> None:
        _LOCAL.active = self.index

    def check_active(self) -> None:
        """Raise where a kernel of ours is launched on a thread whose device is another: it would run there."""
        if (active := getattr(_LOCAL, "active", 0)) != self.index:
            raise RuntimeError(f"this thread's device is {TYPE}:{active}; call activate() of {self.memory.name}")

    def synchronize(self) -> None:
        with self.making:
            streams = list(self.streams)
        for stream in streams:
            stream.synchronize()

    def launch(self, work: Callable[[], object], held: object) -> None:
        """Give work to the current stream; ``held`` is not freed before it is done."""

        def run(_held: object = held) -> None:
            self.goes_on.wait()
            if self.launch_s:
                time.sleep(self.launch_s)
            work()

        self.check()
        if _recording() is None:
            self.num_launches += 1
        self.current().launch(run)

    def copy(self, work: Callable[[], object], held: object) -> None:
        """Launch a copy between the host and the chip."""
        self.launch(work, held)


class Stream:
    """Launched work, done in order by a thread of its own. Fills the Stream protocol."""

    def __init__(self, chip: Chip, priority: int = 0, share: float | None = None) -> None:
        self.chip, self.priority, self.share = chip, priority, share
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        thread = threading.Thread(target=_work, args=(self._work, weakref.ref(self)), name=TYPE, daemon=True)
        weakref.finalize(self, self._work.put, None).atexit = False
        thread.start()
        with chip.making:
            chip.streams.add(self)

    def launch(self, work: Callable[[], object]) -> None:
        if (recording := _recording()) is not None:
            recording.append(work)
        else:
            self._work.put(work)

    def failed(self, error: Exception) -> None:
        self._error = self._error or error

    def synchronize(self) -> None:
        check_may_wait()
        self.record_event().synchronize()
        self.check()

    def check(self) -> None:
        """Raise what failed in the work: as on an accelerator, the host hears of it later."""
        self.chip.check()
        if (error := self._error) is not None:
            raise RuntimeError(f"work on {self.chip.memory.name} failed: {error}") from error

    def wait_event(self, event: base.Event) -> None:
        assert isinstance(event, Event)
        self.launch(event.done.wait)

    def record_event(self) -> Event:
        return Event(self)

    def __enter__(self) -> Self:
        _LOCAL.__dict__.setdefault("streams", []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _LOCAL.streams.pop()


def _recording() -> list[Callable[[], object]] | None:
    """The launches that this thread captures."""
    return getattr(_LOCAL, "recording", None)


@contextmanager
def never_waiting() -> Iterator[None]:
    """A context in which this thread may not wait for a device, nor copy to one from memory that is not pinned.

    Waits raise RuntimeError, as with ``torch.cuda.set_sync_debug_mode("error")`` on a GPU, but of every kind.
    """
    before, _LOCAL.never_waits = getattr(_LOCAL, "never_waits", False), True
    try:
        yield
    finally:
        _LOCAL.never_waits = before


def check_may_wait() -> None:
    if _recording() is not None:
        raise RuntimeError("a step that is captured reads nothing back and waits for nothing")
    if getattr(_LOCAL, "never_waits", False):
        raise RuntimeError("the host waits for the device where it should not: copy through pinned memory")


def _work(work: queue.SimpleQueue[Callable[[], object] | None], stream: weakref.ref[Stream]) -> None:
    """A stream's thread. It keeps no stream alive."""
    with torch.inference_mode():
        while (one := work.get()) is not None:
            try:
                one()
            except Exception as error:  # noqa: BLE001 - the host hears of any of them when it waits
                if (failed := stream()) is not None:
                    failed.failed(error)
            del one


class Event:
    """Fills the Event protocol."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self.done = stream, threading.Event()
        stream.launch(self.done.set)

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        check_may_wait()
        self.done.wait()
        self._stream.check()


@contextmanager
def recorded() -> Iterator[list[Callable[[], object]]]:
    """Keep what this thread launches instead of doing it."""
    work: list[Callable[[], object]] = []
    _LOCAL.recording = work
    try:
        yield work
    finally:
        _LOCAL.recording = None


def record_apart() -> list[Callable[[], object]]:
    """Keep from now on in a list of its own what this thread launches, inside :func:`recorded`."""
    assert _recording() is not None
    _LOCAL.recording = list[Callable[[], object]]()
    work: list[Callable[[], object]] = _LOCAL.recording
    return work
