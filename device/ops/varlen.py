"""torch's attention over packed sequences (flash attention)."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

MAX_HEAD_DIM = 256
#: torch 2.11, the version of the GPU image in docs/reports/gpu.md, groups heads without this argument.
_GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_query: int,
    max_key: int,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attend over packed sequences [T, H, D]; ends are int32 tensors ``[0, end 1, ...]`` on the device.

    With ``causal`` the last query of a sequence sees all its keys, the one before all but one, and so on.
    """
    lengths, window = (query_ends, key_ends, max_query, max_key), (-1, 0 if causal else -1)
    output = varlen_attn(query, key, value, *lengths, scale=scale, window_size=window, **_GROUPED)
    return cast(Tensor, output)


def flashable(states: Tensor) -> Tensor:
    """Return the tensor with D contiguous and zero-padded to a multiple of 8, as flash kernels require."""
    if states.shape[-1] % 8:
        return F.pad(states, (0, -states.shape[-1] % 8))
    return states if states.stride(-1) == 1 else states.contiguous()
