"""Choices that an instance makes from its options and its device: the weights' dtype, the number of KV blocks."""

from __future__ import annotations

from typing import Any

import torch

from device.base import Device
from epd_serve.config import InstanceOptions
from epd_serve.config.kv_size import MIN_BLOCKS, blocks_in
from epd_serve.engine.kv_memory import block_nbytes
from epd_serve.protocol.wire import KVLayout

_DEFAULT_KV_BYTES = 1 << 28
#: Of an accelerator's memory that is free once the weights are loaded; activations need the rest.
_FREE_MEMORY_FOR_KV = 0.8


def num_kv_blocks(options: InstanceOptions, layout: KVLayout, device_type: str, free_bytes: int) -> int:
    """Blocks of the KV cache; ``free_bytes`` are left on the fullest of the instance's devices.

    Raises ValueError for a ``kv_cache_bytes`` that is too small.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    block_bytes = block_nbytes(layout)
    if options.kv_cache_bytes is not None:
        return blocks_in(options.kv_cache_bytes, block_bytes=block_bytes, block_size=layout.block_size)
    if device_type == "cpu":
        size = _DEFAULT_KV_BYTES
    else:
        size = int(free_bytes * _FREE_MEMORY_FOR_KV) * len(options.devices)
    return max(size // block_bytes, MIN_BLOCKS)


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """The dtype of a name; ``auto`` is the one in which the checkpoint was saved."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    declared = getattr(config, "dtype", None) or torch.float32
    return declared if isinstance(declared, torch.dtype) else getattr(torch, declared)


def check_dtype(dtype: torch.dtype, device: Device) -> None:
    """Raise ValueError for a dtype that the device does not serve."""
    if dtype not in device.dtypes:
        possible = " or ".join(str(possible).removeprefix("torch.") for possible in device.dtypes)
        raise ValueError(
            f"{device.name} does not serve models in {str(dtype).removeprefix('torch.')}; set dtype: {possible}"
        )
