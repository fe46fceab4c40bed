"""Operators on tensors of ``npu:0`` whose memory is the host's (``tests/ascend/host_runtime.c``).

Inside :class:`HostOperators` an operator runs on CPU tensors that lie in the same memory, so that code which was
written for an NPU computes. What torch_npu does without an operator stays its own: memory, views, streams, events.
Operators that are written in Python run as they are. torch_npu's have the CPU kernels of ascend_kernels.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import ascend_kernels
import torch
import torch_npu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: Namespaces of operators that have kernels, and none in Python.
_KERNELS = ("aten", "npu", "atb", "prims", "torchvision")
#: What needs no kernel, besides views.
_MEMORY = {
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_")
}


class HostOperators(TorchDispatchMode):
    """One in a process.

    Attributes:
        calls: how often each operator outside aten was called, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        ascend_kernels.register()
        self._atb = torch.library.Library("atb", "IMPL")
        for name, kernel in _ATB.items():
            self._atb.impl(name, kernel, "CPU")
        self._enter_in_python_kernels()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = [one for one in tree_leaves((args, kwargs)) if _is_on_npu(one)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not given and (device is None or device.type != "npu"):
            return func(*args, **kwargs)
        if func.namespace != "aten":
            self.calls[func._schema.name.partition("::")[2]] += 1
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if is_view or func._schema.name in _MEMORY or func.namespace not in _KERNELS:
            return func(*args, **kwargs)
        torch_npu.npu.current_stream().synchronize()
        device = device or given[0].device
        ours: dict[int, Tensor] = {}

        def on_host(value: Any) -> Any:
            if not _is_on_npu(value):
                return value
            alias = _host_alias(value)
            ours[id(alias)] = value
            return alias

        def on_npu(value: Any) -> Any:
            if not isinstance(value, Tensor) or device.type != "npu":
                return value
            if id(value) in ours:
                return ours[id(value)]
            copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            _host_alias(copy).copy_(value)
            return copy

        aliases, options = tree_map(on_host, (args, kwargs))
        if kwargs.get("device") is not None and device.type == "npu":
            options["device"] = torch.device("cpu")
        options.pop("pin_memory", None)
        return tree_map(on_npu, func(*aliases, **options))

    def _enter_in_python_kernels(self) -> None:
        """A mode is left for the kernel of an operator; those in Python call further operators."""
        register = torch.library.Library.impl
        mode = self

        def impl(library: Any, name: Any, kernel: Any, dispatch_key: str = "", **options: Any) -> Any:
            if dispatch_key != "PrivateUse1" or library.ns in _KERNELS:
                return register(library, name, kernel, dispatch_key, **options)

            def inside(*args: Any, **kwargs: Any) -> Any:
                with mode:
                    return kernel(*args, **kwargs)

            return register(library, name, inside, dispatch_key, **options)

        torch.library.Library.impl = impl  # type: ignore[method-assign]


def _is_on_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def _host_alias(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    ascend_kernels.scatter_pa_kv_cache(key, value, key_cache, value_cache, slots, cache_mode="Norm")


def _matmul_add(x: Tensor, weight: Tensor, total: Tensor) -> None:
    total.add_(x.float().T @ weight.float())


_ATB: dict[str, Callable[..., None]] = {
    "_npu_reshape_and_cache": _reshape_and_cache,
    "_npu_matmul_add_fp32": _matmul_add,
}


class SlotMapping:
    """In place of vLLM's Triton kernel of that name: the slot of each token in the cache's pages."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        num_requests = grid[0] - 1

        def run(
            num_tokens: int,
            capacity: int,
            starts: Tensor,
            positions: Tensor,
            table: Tensor,
            stride: int,
            block_size: int,
            slots: Tensor,
            *,
            PAD_ID: int,
            **parallel: int,
        ) -> None:
            counts = starts[: num_requests + 1].cpu().long().diff()
            rows = torch.repeat_interleave(torch.arange(num_requests), counts)
            at = positions[: len(rows)].cpu().long()
            found = torch.full((capacity,), PAD_ID, dtype=slots.dtype)
            found[: len(rows)] = table.cpu()[rows, at // block_size].long() * block_size + at % block_size
            slots[:capacity].copy_(found)

        return run
