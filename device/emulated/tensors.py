"""An accelerator's memory, streams and events without the chip, as a backend of torch.

A tensor on the device ``emulated`` keeps its numbers in the host's memory, where no operator of the CPU reaches
them. A launch returns at once: a thread for each stream computes one operator after another. What is not computed
yet is NaN in floats and the least number in integers, so that whoever reads too early, or lets one stream go on
without the event of another, gets answers that a test tells from right ones. Work inside a :class:`Section` takes
the time that the device would need for it, where the CPU is not slower (:mod:`device.emulated.timeline`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import queue
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map_only

from device import base
from device.emulated.timeline import Demand, Operation, Timeline
from device.present import EMULATED_MEMORY

TYPE = "emulated"
_ROW = struct.Struct("qq")  # a process, its bytes
_LOCAL = threading.local()
_CPU = torch.device("cpu")
_MAX_SHAPES = 4096
_SHAPES: dict[Any, Any] = {}
#: Copies that take less of the host link are not worth the emulation's own time.
_LEAST_COPY_S = 5e-5
#: A copy engine computes nothing, and writes at a fraction of the memory's bandwidth.
COPYING = Demand(compute=0.0, bandwidth=0.02)


class EmulatedMemoryError(torch.OutOfMemoryError):
    """The emulated device's memory is full; torch's own error of an accelerator."""


class Memory:
    """The memory of one device, in bytes: of this process, and of all that share ``directory``. Thread-safe."""

    def __init__(self, name: str, total: int, directory: str | None) -> None:
        self.name, self.total, self.fraction = name, total, 1.0
        self.peak = self._used = 0
        self._ended: deque[int] = deque()  # bytes of what has ended; that may happen at any place of a thread
        self._lock = threading.Lock()
        self._file = None if directory is None else Path(directory, name).open("a+b", buffering=0)  # noqa: SIM115

    @property
    def used(self) -> int:
        """The bytes of this process."""
        with self._lock:
            return self._settled()

    @property
    def free(self) -> int:
        with self._lock, self._of_others() as others:
            return self.total - self._settled() - others

    def take(self, num_bytes: int) -> Block:
        with self._lock, self._of_others() as others:
            used = self._settled()
            free = min(int(self.total * self.fraction) - used, self.total - used - others)
            if num_bytes > free:
                raise EmulatedMemoryError(
                    f"emulated out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB on {self.name}, of "
                    f"whose {self.total / 2**20:.0f} MiB {free / 2**20:.2f} are free for this process"
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

    @contextmanager
    def _of_others(self) -> Iterator[int]:
        """The bytes of other processes that live; at its end the file says what this one has."""
        if self._file is None:
            yield 0
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.seek(0)
        rows: dict[int, int] = dict(_ROW.iter_unpack(self._file.read()))
        others = ((pid, size) for pid, size in rows.items() if pid != os.getpid())
        rows = {pid: size for pid, size in others if Path(f"/proc/{pid}").exists()}
        try:
            yield sum(rows.values())
        finally:
            rows[os.getpid()] = self._settled()
            self._file.truncate(0)
            self._file.write(b"".join(_ROW.pack(*row) for row in rows.items()))
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Block:
    """A piece of a device's memory; it is free when no tensor and no launched work refers to it."""

    __slots__ = ("__weakref__",)


class Chip:
    """One emulated device of this process: its memory, its default stream and its time.

    Attributes:
        launch_s: seconds by which the device lengthens each launch.
        num_launches: operators, copies and graphs that were launched so far.
    """

    def __init__(self, index: int, name: str, memory_bytes: int, host_bytes_per_s: float) -> None:
        self.index = index
        self.host_bytes_per_s = host_bytes_per_s
        directory = os.environ.get(EMULATED_MEMORY)
        self.memory = Memory(name, memory_bytes, directory)
        self.timeline = Timeline(name, directory)
        self.launch_s, self.num_launches = 0.0, 0
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.making = threading.Lock()
        self.default = Stream(self)

    def current(self) -> Stream:
        stack: list[Stream] = getattr(_LOCAL, "streams", [])
        return next((stream for stream in reversed(stack) if stream.chip is self), self.default)

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
            if self.launch_s:
                time.sleep(self.launch_s)
            work()

        if _recording() is None:
            self.num_launches += 1
        self.current().launch(run)

    def share(self, num_bytes: int) -> tuple[EmulatedTensor, bytes]:
        """Zeroed memory that other processes can map, and a handle of it; it goes with its last view."""
        block, name = self.memory.take(num_bytes), f"emulated-{uuid.uuid4().hex}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(block, os.close, fd).atexit = False
        os.ftruncate(fd, num_bytes)
        handle = json.dumps([os.getpid(), fd, name, num_bytes]).encode()
        return EmulatedTensor(_mapping(fd, num_bytes), block, self.index), handle

    @contextmanager
    def mapped(self, handle: bytes) -> Iterator[EmulatedTensor]:
        """The memory behind another process's handle: it takes none of this one's.

        Raises ValueError where it is gone, and RuntimeError at the end where something would still reach it.
        """
        try:
            pid, number, name, num_bytes = json.loads(handle)
            path = Path(f"/proc/{pid}/fd/{number}")
            if not str(path.readlink()).startswith(f"/memfd:{name}"):
                raise ValueError(f"process {pid} has given its memory up")
            with path.open("r+b") as file:
                raw = _mapping(file.fileno(), num_bytes)
        except (OSError, TypeError) as error:
            raise ValueError(f"memory of an emulated device cannot be mapped: {error}") from error
        memory = EmulatedTensor(raw, Block(), self.index)
        used = weakref.ref(memory.block)
        del raw
        try:
            yield memory
        finally:
            del memory
            if used() is not None:
                raise RuntimeError(f"memory is unmapped that {self.memory.name}'s work or a tensor still uses")

    def copy(self, work: Callable[[], object], held: object, num_bytes: int) -> None:
        """Launch a copy over the host link."""
        seconds = num_bytes / self.host_bytes_per_s
        if seconds < _LEAST_COPY_S:
            self.launch(work, held)
            return
        section = Section(self.current(), seconds, COPYING)
        self.launch(work, held)
        section.end()


def _mapping(fd: int, num_bytes: int) -> Tensor:
    with torch.inference_mode():
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


class Section:
    """Work of a stream from here to :meth:`end` takes ``cost_s`` of the device, or longer where the CPU does."""

    def __init__(self, stream: Stream, cost_s: float, demand: Demand) -> None:
        self._stream = stream
        self._operation: Operation | None = None
        lane, launched_s = stream.lane, stream.chip.timeline.clock()

        def begin() -> None:
            self._operation = lane.launch(cost_s, demand=demand, launched_s=launched_s)

        stream.launch(begin)

    def end(self) -> None:
        self._stream.launch(self._wait)

    def _wait(self) -> None:
        if self._operation is None:  # its beginning has failed
            return
        lane = self._operation.stream
        if self._operation.query():
            lane.delay(lane.timeline.clock())  # the CPU took longer: the device has been waiting since
        else:
            self._operation.wait()


class Stream:
    """Launched work, done in order by a thread of its own. Fills the Stream protocol."""

    def __init__(self, chip: Chip, priority: int = 0, share: float | None = None) -> None:
        self.chip = chip
        self.lane = chip.timeline.stream(priority, share)
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
        _check_may_wait()
        self.record_event().synchronize()
        self.check()

    def check(self) -> None:
        """Raise what failed in the work: as on an accelerator, the host hears of it later."""
        if (error := self._error) is not None:
            raise RuntimeError(f"work on {self.chip.memory.name} failed: {error}") from error

    def wait_event(self, event: base.Event) -> None:
        event.wait(self)

    def record_event(self, event: base.Event | None = None) -> base.Event:
        event = event or Event(self.chip)
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        if not hasattr(_LOCAL, "streams"):
            _LOCAL.streams = []
        _LOCAL.streams.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def _check_may_wait() -> None:
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

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._done: threading.Event | None = None
        self._stream: Stream | None = None
        self._times: list[float] = []

    def record(self, stream: base.Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self._stream = stream or self._chip.current()
        self._done, self._times = done, times = threading.Event(), list[float]()

        def mark() -> None:
            times.append(time.perf_counter())
            done.set()

        self._stream.launch(mark)

    def wait(self, stream: base.Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        if (done := self._done) is not None:
            (stream or self._chip.current()).launch(done.wait)

    def query(self) -> bool:
        return self._done is None or self._done.is_set()

    def synchronize(self) -> None:
        _check_may_wait()
        if self._done is not None and self._stream is not None:
            self._done.wait()
            self._stream.check()

    def elapsed_time(self, end_event: base.Event) -> float:
        """Milliseconds until ``end_event``. Raises ValueError unless both were recorded and are done."""
        if not isinstance(end_event, Event) or not self._times or not end_event._times:
            raise ValueError("elapsed_time needs two events of this device that are both done")
        return (end_event._times[0] - self._times[0]) * 1e3


class EmulatedTensor(Tensor):
    """A tensor of an emulated device.

    Attributes:
        raw: its numbers, on the host; the stream's thread alone reads and writes them.
        block: the memory that they take.
    """

    raw: Tensor
    block: Block

    @staticmethod
    def __new__(cls, raw: Tensor, block: Block, index: int) -> EmulatedTensor:
        with torch.inference_mode(False):  # so that both kinds of code may take views of it
            made: EmulatedTensor = Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                layout=raw.layout,
                device=torch.device(TYPE, index),
            )
        made.raw, made.block = raw, block
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _operate(func, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EmulatedTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


_CHIPS: dict[int, Chip] = {}
_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Make ``emulated`` a device of torch in this process. Raises RuntimeError where another took its place."""
    if _LIBRARIES:
        return
    backend_registration._setup_privateuseone_for_python_backend(TYPE)
    new_library: Any = torch.library.Library
    everything, aten = new_library("_", "IMPL"), new_library("aten", "IMPL")
    everything.fallback(_operate, "PrivateUse1")
    for overload in ("start_step", "start", "default"):  # torch's own resize an output that they find empty
        op = getattr(torch.ops.aten.arange, overload)
        aten.impl(op, partial(_operate, op), "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")  # torch.tensor() comes by here
    _LIBRARIES.extend((everything, aten))


def add_chip(index: int, name: str, memory_bytes: int, host_bytes_per_s: float) -> Chip:
    """The device with this index in this process. Raises ValueError where it is another one already."""
    install()
    if (chip := _CHIPS.get(index)) is None:
        chip = _CHIPS[index] = Chip(index, name, memory_bytes, host_bytes_per_s)
    if chip.memory.name != name:
        raise ValueError(f"{TYPE}:{index} is {chip.memory.name} in this process")
    return chip


def record_event(device: torch.device) -> base.Event:
    """A new event, recorded on the current stream of a device."""
    return _CHIPS[device.index or 0].current().record_event()


def launch(work: Callable[..., object], *tensors: Tensor) -> None:
    """Have the current stream do work of another library with the numbers of tensors of one device."""
    raw = _raw(tensors)
    _CHIPS[tensors[0].device.index or 0].launch(lambda: work(*raw), tensors)


def _operate(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: launched, its outputs unknown until the stream comes to it."""
    if (own := _OWN.get(op._schema.name)) is not None:
        return own(*args, **kwargs)
    if (parts := op.decompose(*args, **kwargs)) is not NotImplemented:  # inference mode leaves that to us
        return parts
    flat, _ = tree_flatten((args, kwargs))
    tensors = [one for one in flat if isinstance(one, Tensor)]
    ours = [one for one in tensors if isinstance(one, EmulatedTensor)]
    if len(ours) < len(tensors) and not op._schema.name.startswith("aten::index"):
        for one in tensors:
            if not isinstance(one, EmulatedTensor) and one.dim():
                raise RuntimeError(
                    f"{op}: expected all tensors on {TYPE}, found {tuple(one.shape)} on {one.device}"
                )
    device = torch.device(kwargs.get("device") or (ours[0].device if ours else TYPE))
    if device.type != TYPE:  # a factory, like empty_like
        return op(*_mapped(args, _on_meta), **kwargs)
    chip = _CHIPS[device.index or 0]
    schema = op._schema
    aliases = [one.alias_info for one in schema.returns]
    writes = {
        name
        for argument in schema.arguments
        if (info := argument.alias_info) is not None and info.is_write
        for name in info.before_set
    }
    if any(aliases) and not writes:
        with torch.inference_mode():
            views = op(*_raw(args), **_raw(kwargs))
        return tree_map_only(Tensor, lambda view: EmulatedTensor(view, ours[0].block, chip.index), views)
    raw_args, raw_kwargs = _raw(args), _raw(_on(kwargs, _CPU))
    if writes:
        chip.launch(lambda: op(*raw_args, **raw_kwargs), ours)
        return _written(schema, args, kwargs)
    with torch.inference_mode():
        try:
            shapes = _shapes(op, args, kwargs)
        except RuntimeError:  # a shape or a number that depends on data: the host waits for it
            chip.current().synchronize()
            return _wrapped(op(*raw_args, **raw_kwargs), chip)
    outputs = tree_map_only(Tensor, lambda like: _allocate(like, chip), shapes)
    targets = [one.raw for one in tree_flatten(outputs)[0] if isinstance(one, EmulatedTensor)]

    def compute() -> None:
        results = tree_flatten(op(*raw_args, **raw_kwargs))[0]
        for target, result in zip(targets, (one for one in results if isinstance(one, Tensor)), strict=True):
            target.copy_(result)

    if not schema.name.startswith("aten::empty") and not schema.name.startswith("aten::new_empty"):
        chip.launch(compute, [*ours, outputs])
    return outputs


def _allocate(like: Tensor, chip: Chip) -> EmulatedTensor:
    """Memory of a shape, full of what no result is."""
    block = chip.memory.take(like.untyped_storage().nbytes())
    with torch.inference_mode():
        raw = unknown(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
    return EmulatedTensor(raw, block, chip.index)


def unknown(tensor: Tensor) -> Tensor:
    """Fill with what no result is: NaN, or the least integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between the device and the host, in either direction, or within the device."""
    if not isinstance(target, EmulatedTensor):
        assert isinstance(source, EmulatedTensor)
        chip, raw = _CHIPS[source.device.index or 0], source.raw
        if non_blocking:
            with torch.inference_mode():
                unknown(target)
        chip.copy(lambda: target.copy_(raw), (source, target), raw.nbytes)
        if not non_blocking:
            chip.current().synchronize()
        return target
    chip, goal = _CHIPS[target.device.index or 0], target.raw
    if isinstance(source, EmulatedTensor):
        raw = source.raw
        chip.launch(lambda: goal.copy_(raw), (target, source))
    else:
        # The host reads ordinary memory before it goes on, as a driver does; the device reads pinned memory.
        if non_blocking and (is_pinned(source) or not source.nbytes):
            raw = source
        else:
            _check_may_wait()
            raw = source.detach().clone()
        chip.copy(lambda: goal.copy_(raw), (target, source), goal.nbytes)
        if not non_blocking:
            chip.current().synchronize()
    return target


def _to_copy(
    source: Tensor, *, non_blocking: bool = False, pin_memory: bool | None = None, **asked: Any
) -> Tensor:
    """``asked``: dtype, layout, device and memory format, None for those of the source."""
    target = torch.empty_like(source, **{name: value for name, value in asked.items() if value is not None})
    return target.copy_(source, non_blocking=non_blocking)


_OWN: dict[str, Callable[..., Any]] = {
    "aten::copy_": _copy,
    "aten::_to_copy": _to_copy,
    "aten::_fused_sdp_choice": lambda *args, **kwargs: 0,  # by plain operators
}
_PINNED: dict[int, int] = {}  # the bytes from each address on


def pinned(tensor: Tensor) -> Tensor:
    """A copy from which the device reads when its stream comes to it."""
    copy = tensor.detach().clone()
    weakref.finalize(copy, pin(copy)).atexit = False
    return copy


def pin(memory: Tensor) -> Callable[[], None]:
    """Have the device read this memory when its stream comes to it, until the returned function is called."""
    address = memory.data_ptr()
    _PINNED[address] = memory.nbytes

    def unpin() -> None:
        _PINNED.pop(address, None)

    return unpin


def is_pinned(tensor: Tensor) -> bool:
    address = tensor.data_ptr()
    return address in _PINNED or any(start <= address < start + count for start, count in list(_PINNED.items()))


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


def _shapes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs on torch's device ``meta``, which computes shapes alone; those of the latest calls are kept."""
    key = (op, _signature(args), _signature(kwargs))
    if (shapes := _SHAPES.get(key)) is None:
        shapes = op(*_mapped(args, _on_meta), **_mapped(_on(kwargs, torch.device("meta")), _on_meta))
        if len(_SHAPES) == _MAX_SHAPES:
            _SHAPES.clear()
        _SHAPES[key] = shapes
    return shapes


def _signature(value: Any) -> Any:
    match value:
        case Tensor():
            return value.size(), value.stride(), value.dtype
        case tuple() | list():
            return tuple(map(_signature, value))
        case dict():
            return tuple((name, _signature(one)) for name, one in value.items())
        case _:
            return type(value), value


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _raw(values: Any) -> Any:
    return _mapped(values, lambda one: one.raw if isinstance(one, EmulatedTensor) else one)


def _mapped(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments of an operator with other tensors in them."""
    match values:
        case Tensor():
            return change(values)
        case tuple() | list():
            return type(values)(_mapped(one, change) for one in values)
        case dict():
            return {name: _mapped(one, change) for name, one in values.items()}
        case _:
            return values


def _on(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    kwargs = {name: device if isinstance(value, torch.device) else value for name, value in kwargs.items()}
    kwargs.pop("pin_memory", None)
    return kwargs


def _wrapped(values: Any, chip: Chip) -> Any:
    def wrap(raw: Tensor) -> EmulatedTensor:
        return EmulatedTensor(raw, chip.memory.take(raw.untyped_storage().nbytes()), chip.index)

    return tree_map_only(Tensor, wrap, values)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that an operator has written into, as it returns them."""
    by_alias: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            by_alias.update(dict.fromkeys(argument.alias_info.before_set, value))
    sets = [one.alias_info.before_set for one in schema.returns if one.alias_info is not None]
    found = [by_alias[next(iter(names))] for names in sets]
    return found[0] if len(found) == 1 else tuple(found) if found else None
