"""Lazy weights in the safetensors files of a checkpoint, read when a device needs them.

A model is built from them as if they were tensors. ``weight[rows].to(device)`` reads only these rows, straight to
the device: the host holds one piece of a weight at a time, however large the model is.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from epd_serve.weight_files import read_header

_INDEX = "model.safetensors.index.json"
#: Host memory in bytes used by a read on its way to another device.
PIECE_BYTES = 1 << 24
_WHOLE = slice(None)
#: Names in the header of a safetensors file.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _File:
    """A file of weights: mapped for long-lived views, read into separate memory for others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: Any = None
        self._data_start, self.tensors = read_header(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def map(self, name: str, ranges: list[slice]) -> Tensor:
        """Return a view of the file's pages, which stay mapped until the last such view is freed."""
        if self._kept is None:
            self._kept = safe_open(self._path, framework="pt")
        part: Tensor = self._kept.get_slice(name)[tuple(ranges) or ...]
        return part

    def read(self, name: str, ranges: list[slice], *, pinned: bool = False) -> Tensor:
        entry = self.tensors[name]
        shape, dtype = entry["shape"], _DTYPES.get(entry["dtype"])
        is_whole = all(part == slice(0, size) for part, size in zip(ranges[1:], shape[1:], strict=True))
        if dtype is None or not (ranges and is_whole):
            mapped: Any = safe_open(self._path, framework="pt")
            part: Tensor = mapped.get_slice(name)[tuple(ranges) or ...]
            return part.pin_memory() if pinned else part
        rows, row_bytes = ranges[0], prod(shape[1:]) * dtype.itemsize
        part = torch.empty([rows.stop - rows.start, *shape[1:]], dtype=dtype, pin_memory=pinned)
        at = self._data_start + entry["data_offsets"][0] + rows.start * row_bytes
        data = part.view(-1).view(torch.uint8).numpy().data
        while data:
            count = os.preadv(self._descriptor, [data], at)
            if not count:
                raise ValueError(f"{self._path} ends within {name}; copy it again")
            data, at = data[count:], at + count
        return part


class StoredWeight(Tensor):
    """A weight, or a range of it in each dimension, which torch sees on the device ``meta``.

    Slices, dtype conversions and new parameters of it are stored weights. Other operations read it: ``to`` into
    the given device, all others into ``home``.
    """

    file: _File
    name_in_file: str
    ranges: list[slice]
    home: torch.device

    @staticmethod
    def __new__(
        cls, file: _File, name: str, ranges: list[slice], dtype: torch.dtype, home: torch.device
    ) -> StoredWeight:
        shape = [one.stop - one.start for one in ranges]
        made: StoredWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("meta"))
        made.file, made.name_in_file, made.ranges, made.home = file, name, ranges, home
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = _OWN.get(func._schema.name)
        if own is not None and (result := own(*args, **(kwargs or {}))) is not None:
            return result
        args, kwargs = tree_map_only(StoredWeight, lambda one: one.read(one.home), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredWeight({self.name_in_file}, {tuple(self.shape)}, {self.dtype})"

    def part(self, ranges: list[slice] | None = None, dtype: torch.dtype | None = None) -> StoredWeight:
        """Return the weight, or a range of it, in that dtype."""
        return StoredWeight(self.file, self.name_in_file, ranges or self.ranges, dtype or self.dtype, self.home)

    def read(self, device: torch.device) -> Tensor:
        """Return its values on a device; on the host, the file's pages themselves if dtypes agree."""
        if device.type == "cpu" and all(self.shape):
            return self.file.map(self.name_in_file, self.ranges).to(self.dtype)
        target = torch.empty(self.shape, dtype=self.dtype, device=device)
        pinned = device.type in ("cuda", "npu")
        for here, piece in self._pieces():  # torch keeps a pinned piece alive until its copy ends
            source = self.file.read(self.name_in_file, piece.ranges, pinned=pinned)
            target[here].copy_(source, non_blocking=pinned)
        return target

    def _pieces(self) -> Iterator[tuple[slice, StoredWeight]]:
        """Yield pieces along its first dimension, one at a time in host memory."""
        if not self.ranges:
            yield _WHOLE, self
            return
        first, *rest = self.ranges
        row_bytes = prod(self.shape[1:]) * max(self.dtype.itemsize, 4)
        num_rows = max(PIECE_BYTES // max(row_bytes, 1), 1)
        for start in range(first.start, first.stop, num_rows):
            stop = min(start + num_rows, first.stop)
            yield slice(start - first.start, stop - first.start), self.part([slice(start, stop), *rest])


def _slice(
    weight: StoredWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> StoredWeight | None:
    if step != 1:
        return None
    own = weight.ranges[dim]
    here = range(own.start, own.stop)[start:end]
    ranges = list(weight.ranges)
    ranges[dim] = slice(here.start, max(here.stop, here.start))
    return weight.part(ranges)


def _to(
    weight: StoredWeight, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    weight = weight.part(dtype=dtype)
    return weight if device is None or device.type == "meta" else weight.read(device)


def _equal(one: Tensor, other: Tensor) -> bool | None:
    if not (isinstance(one, StoredWeight) and isinstance(other, StoredWeight)):
        return None
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pairs = zip(one._pieces(), other._pieces(), strict=True)
    return all(
        torch.equal(*(piece.file.read(piece.name_in_file, piece.ranges) for _, piece in pair)) for pair in pairs
    )


_OWN: dict[str, Callable[..., Any]] = {
    "aten::detach": StoredWeight.part,
    "aten::alias": StoredWeight.part,
    "aten::slice": _slice,
    "aten::_to_copy": _to,
    "aten::equal": _equal,
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A weight in the form that transformers loads: it takes all of it and converts device and dtype."""

    file: _File
    name: str
    shape: list[int]
    home: torch.device

    def __getitem__(self, _: Any) -> Listed:
        return self

    def to(self, device: Any, dtype: torch.dtype) -> StoredWeight:
        return StoredWeight(self.file, self.name, [slice(0, size) for size in self.shape], dtype, self.home)


def listed_weights(path: Path, home: torch.device) -> dict[str, Listed]:
    """Return the weights of a checkpoint by name. Raises ValueError without safetensors files.

    ``home``: device for weights combined from several while the model is built.
    """
    files = [path / "model.safetensors"]
    if not files[0].is_file() and (path / _INDEX).is_file():
        weight_map = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted({path / str(name) for name in weight_map.values()})
    listed: dict[str, Listed] = {}
    for file in files:
        stored = _File(file)
        for name, entry in stored.tensors.items():
            listed[name] = Listed(stored, name, entry["shape"], home)
    return listed


def read_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model, with its stored weights, to a device, keeping shared weights shared. Returns it."""
    read: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the source, so that its id stays unique
    for module in model.modules():
        holders: list[dict[str, Any]] = [module._parameters, module._buffers]
        for owned in holders:
            for name, weight in owned.items():
                if weight is None:
                    continue
                if id(weight) not in read:
                    there = weight.detach().to(device)
                    if isinstance(weight, nn.Parameter):
                        there = nn.Parameter(there, requires_grad=False)
                    read[id(weight)] = weight, there
                owned[name] = read[id(weight)][1]
    return model
