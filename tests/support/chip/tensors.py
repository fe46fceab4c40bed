"""Tensors of a test's accelerator, as a backend of torch.

A tensor on the device ``chip`` keeps its numbers in the host's memory, where no operator of the CPU reaches
them. Operators are launched on the device's current stream (:mod:`chip.chip`). What is not computed yet
is NaN in floats and the least number in integers, so that whoever reads too early, or lets one stream go on
without the event of another, gets answers that a test tells from right ones.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chip.chip import TYPE, Block, Chip, check_may_wait
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map_only

from device import base, copies

_CPU = torch.device("cpu")
_MAX_SHAPES = 4096
_SHAPES: dict[Any, Any] = {}


class ChipTensor(Tensor):
    """A tensor of an emulated device.

    Attributes:
        raw: its numbers, on the host; the stream's thread alone reads and writes them.
        block: the memory that they take.
    """

    raw: Tensor
    block: Block

    @staticmethod
    def __new__(cls, raw: Tensor, block: Block, index: int) -> ChipTensor:
        with torch.inference_mode(False):  # so that both kinds of code may take views of it
            made: ChipTensor = Tensor._make_wrapper_subclass(
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
        return f"ChipTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


def share_memory(chip: Chip, num_bytes: int) -> tuple[ChipTensor, bytes]:
    """Zeroed memory that other processes can map, and a handle of it; it goes with its last view."""
    block, name = chip.memory.take(num_bytes), f"chip-{uuid.uuid4().hex}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    weakref.finalize(block, os.close, fd).atexit = False
    os.ftruncate(fd, num_bytes)
    handle = json.dumps([os.getpid(), fd, name, num_bytes]).encode()
    return ChipTensor(_mapping(fd, num_bytes), block, chip.index), handle


@contextmanager
def mapped_memory(chip: Chip, handle: bytes) -> Iterator[ChipTensor]:
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
        raise ValueError(f"memory of a chip cannot be mapped: {error}") from error
    memory = ChipTensor(raw, Block(), chip.index)
    used = weakref.ref(memory.block)
    del raw
    try:
        yield memory
    finally:
        del memory
        if used() is not None:
            raise RuntimeError(f"memory is unmapped that {chip.memory.name}'s work or a tensor still uses")


def _mapping(fd: int, num_bytes: int) -> Tensor:
    with torch.inference_mode():
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


_CHIPS: dict[int, Chip] = {}
_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Make ``chip`` a device of torch in this process. Raises RuntimeError where another took its place."""
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
    pin_for, start_readback = copies.pin, copies.start_readback

    def pin_copy(tensor: Tensor, device: torch.device) -> Tensor:
        return pinned(tensor) if device.type == TYPE else pin_for(tensor, device)

    def read_back(tensor: Tensor) -> tuple[Tensor, base.Event]:
        if tensor.device.type != TYPE:
            return start_readback(tensor)
        copy = tensor.to("cpu", non_blocking=True)
        return copy, _CHIPS[tensor.device.index or 0].current().record_event()

    copies.pin, copies.start_readback = pin_copy, read_back


def add_chip(index: int, memory_bytes: int) -> Chip:
    """The chip with this index in this process."""
    install()
    if index not in _CHIPS:
        _CHIPS[index] = Chip(index, memory_bytes)
    return _CHIPS[index]


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
    ours = [one for one in tensors if isinstance(one, ChipTensor)]
    if len(ours) < len(tensors) and not op._schema.name.startswith("aten::index"):
        for one in tensors:
            if not isinstance(one, ChipTensor) and one.dim():
                raise RuntimeError(
                    f"{op}: expected all tensors on {TYPE}, found {tuple(one.shape)} on {one.device}"
                )
    device = torch.device(kwargs.get("device") or (ours[0].device if ours else TYPE))
    if device.type != TYPE:  # a factory, like empty_like
        return op(*_mapped(args, _on_meta), **kwargs)
    chip = _CHIPS[device.index or 0]
    schema = op._schema
    aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
    written = _written(schema, args, kwargs)
    if aliases and not written:
        with torch.inference_mode():
            views = op(*_raw(args), **_raw(kwargs))
        return tree_map_only(Tensor, lambda view: ChipTensor(view, ours[0].block, chip.index), views)
    raw_args, raw_kwargs = _raw(args), _raw(_on(kwargs, _CPU))
    if written:
        chip.launch(lambda: op(*raw_args, **raw_kwargs), ours)
        found = [written[next(iter(one.before_set))] for one in aliases]
        return found[0] if len(found) == 1 else tuple(found) if found else None
    with torch.inference_mode():
        try:
            shapes = _shapes(op, args, kwargs)
        except RuntimeError:  # a shape or a number that depends on data: the host waits for it
            chip.current().synchronize()
            return _wrapped(op(*raw_args, **raw_kwargs), chip)
    outputs = tree_map_only(Tensor, lambda like: _allocate(like, chip), shapes)
    targets = [one.raw for one in tree_flatten(outputs)[0] if isinstance(one, ChipTensor)]

    def compute() -> None:
        results = tree_flatten(op(*raw_args, **raw_kwargs))[0]
        for target, result in zip(targets, (one for one in results if isinstance(one, Tensor)), strict=True):
            target.copy_(result)

    if not schema.name.startswith("aten::empty") and not schema.name.startswith("aten::new_empty"):
        chip.launch(compute, [*ours, outputs])
    return outputs


def _allocate(like: Tensor, chip: Chip) -> ChipTensor:
    """Memory of a shape, full of what no result is."""
    block = chip.memory.take(like.untyped_storage().nbytes())
    with torch.inference_mode():
        raw = unknown(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype))
    return ChipTensor(raw, block, chip.index)


def unknown(tensor: Tensor) -> Tensor:
    """Fill with what no result is: NaN, or the least integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between the device and the host, in either direction, or within the device."""
    if not isinstance(target, ChipTensor):
        assert isinstance(source, ChipTensor)
        chip, raw = _CHIPS[source.device.index or 0], source.raw
        if non_blocking:
            with torch.inference_mode():
                unknown(target)
        chip.copy(lambda: target.copy_(raw), (source, target))
        if not non_blocking:
            chip.current().synchronize()
        return target
    chip, goal = _CHIPS[target.device.index or 0], target.raw
    if isinstance(source, ChipTensor):
        raw = source.raw
        chip.launch(lambda: goal.copy_(raw), (target, source))
    else:
        # The host reads ordinary memory before it goes on, as a driver does; the device reads pinned memory.
        if non_blocking and (is_pinned(source) or not source.nbytes):
            raw = source
        else:
            check_may_wait()
            raw = source.detach().clone()
        chip.copy(lambda: goal.copy_(raw), (target, source))
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
    return _mapped(values, lambda one: one.raw if isinstance(one, ChipTensor) else one)


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
    def wrap(raw: Tensor) -> ChipTensor:
        return ChipTensor(raw, chip.memory.take(raw.untyped_storage().nbytes()), chip.index)

    return tree_map_only(Tensor, wrap, values)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that an operator writes into, by the names of their aliases."""
    written: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written.update(dict.fromkeys(argument.alias_info.before_set, value))
    return written
