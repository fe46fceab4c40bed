"""torch's attention over packed sequences (flash attention), with one signature for all torch versions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import torch.nn.functional as F
from torch import Tensor

MAX_HEAD_DIM = 256


class Varlen(Protocol):
    """Attention over packed sequences [T, H, D]; ends are int32 tensors ``[0, end 1, ...]`` on the device.

    With ``causal`` the last query of a sequence sees all its keys, the one before all but one, and so on.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


def find_varlen() -> Varlen | None:
    """Return torch's varlen attention; None if it lacks a scale (before 2.11)."""
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    return adapt_varlen(function)


def adapt_varlen(function: Callable[..., object]) -> Varlen | None:
    """Adapt ``function`` to Varlen: torch 2.11 groups heads by default, later versions need ``enable_gqa``."""
    parameters = inspect.signature(function).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None
    if "enable_gqa" in parameters:
        function = partial(function, enable_gqa=True)

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
        window = (-1, 0) if causal else (-1, -1)
        output = function(
            query, key, value, query_ends, key_ends, max_query, max_key, scale=scale, window_size=window
        )
        return cast(Tensor, output)

    return varlen


def flashable(states: Tensor) -> Tensor:
    """Return the tensor with D contiguous and zero-padded to a multiple of 8, as flash kernels require."""
    if states.shape[-1] % 8:
        return F.pad(states, (0, -states.shape[-1] % 8))
    return states if states.stride(-1) == 1 else states.contiguous()
