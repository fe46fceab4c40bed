"""The operators between the matrix products of Qwen2.5-VL-7B's language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_timing import call_ms
from device.base import AttentionOps, Device
from device.ops.plain import PlainOps

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 3584, 28, 4, 128, 18944
LAYER_TOKENS, _TINY_TOKENS = (64, 4096), (8,)


def measure_layers(device: Device, *, tiny: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield milliseconds of each operator, ours and plain torch's, by number of tokens."""
    for tokens in _TINY_TOKENS if tiny else LAYER_TOKENS:
        ours, torchs = (layer_calls(ops, tokens, device.torch_device) for ops in (device.ops, PlainOps()))
        for name, call in ours.items():
            row = {"ours": call_ms(device, [call] * 8), "torch": call_ms(device, [torchs[name]] * 8)}
            yield f"{name}, {tokens} tokens", row


def layer_calls(ops: AttentionOps, tokens: int, where: torch.device) -> dict[str, Callable[[], object]]:
    """The operators between the matrix products of Qwen2.5-VL-7B, by name."""
    hidden, residual = _random(where, 2, tokens, HIDDEN).unbind(0)
    weight = _random(where, HIDDEN)
    fused = _random(where, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    query, key = fused[:, :HEADS], fused[:, HEADS : HEADS + KV_HEADS]
    cos, sin = torch.rand(2, tokens, HEAD_DIM).to(where).unbind(0)
    gate_up = _random(where, tokens, 2 * FEED_FORWARD)
    return {
        "rms_norm": partial(ops.rms_norm, hidden, weight, 1e-6),
        "add_rms_norm": partial(ops.add_rms_norm, hidden, residual, weight, 1e-6),
        "rotary": partial(ops.rotary, query, key, cos, sin),
        "swiglu": partial(ops.swiglu, gate_up),
    }


def _random(where: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape).to(where, torch.bfloat16)
