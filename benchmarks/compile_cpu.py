"""Whether torch.compile with freezing would make the decoder's layers faster on this CPU than they are.

    python -m benchmarks.compile_cpu [--layers 4]

Everything of a 0.5 B layer but attention, which is compiled in neither case: "ours" are the packed oneDNN products
and operators that the engine runs, "compiled" is the same layer in plain torch under torch.compile (inductor,
freezing). One thread, bfloat16, processor time, medians of calls that take turns. The first calls compile: their
seconds are for ``--layers`` layers, each with weights, and so code, of its own; those of g++ come on top.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import RESULTS, argument_parser, write
from device.host import processor_name
from device.ops.linear import gated_linear, linear
from device.registry import get_device

RESULT = RESULTS / "compile-cpu.json"
HIDDEN, FEED_FORWARD, QUERY_HEADS, KV_HEADS, HEAD_DIM = 896, 4864, 14, 2, 64
EPSILON = 1e-6
Weights = dict[str, Tensor]


class Ours:
    """A layer as the engine runs it; see :mod:`epd_serve.models.decoder`."""

    def __init__(self, weights: Weights) -> None:
        self._ops = get_device("cpu").ops
        self._qkv, self._output = linear(weights["qkv"], weights["bias"]), linear(weights["output"])
        self._inner = gated_linear(weights["gate"], weights["up"], self._ops.swiglu)
        self._down, self._norm = linear(weights["down"]), weights["norm"]

    def head(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = self._qkv(hidden).view(len(hidden), -1, HEAD_DIM)
        query, key, value = torch.split(states, [QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
        return *self._ops.rotary(query, key, cos, sin), value

    def tail(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual = self._ops.add_rms_norm(self._output(attended), residual, self._norm, EPSILON)
        return self._ops.add_rms_norm(self._down(self._inner(hidden)), residual, self._norm, EPSILON)


class Head(nn.Module):
    """Plain torch, from the hidden states to query, key and value."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.qkv, self.bias = (nn.Parameter(weights[name], requires_grad=False) for name in ("qkv", "bias"))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        states = F.linear(hidden, self.qkv, self.bias).view(len(hidden), -1, HEAD_DIM)
        query, key, value = torch.split(states, [QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value


class Tail(nn.Module):
    """Plain torch, from the attention's result to the next layer's hidden states."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for name in ("output", "gate", "up", "down", "norm"):
            self.register_parameter(name, nn.Parameter(weights[name], requires_grad=False))

    def forward(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = F.linear(attended, self.output) + residual
        hidden = _normed(residual, self.norm)
        inner = F.silu(F.linear(hidden, self.gate)) * F.linear(hidden, self.up)
        residual = F.linear(inner, self.down) + residual
        return _normed(residual, self.norm), residual


def _normed(states: Tensor, weight: Any) -> Tensor:
    wide = states.float()
    normed: Tensor = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(states.dtype) * weight
    return normed


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = states.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(states.dtype)


def _weights() -> Weights:
    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape) * 0.02).bfloat16()

    width = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM
    return {
        "qkv": random(width, HIDDEN),
        "bias": random(width),
        "output": random(HIDDEN, QUERY_HEADS * HEAD_DIM),
        "gate": random(FEED_FORWARD, HIDDEN),
        "up": random(FEED_FORWARD, HIDDEN),
        "down": random(HIDDEN, FEED_FORWARD),
        "norm": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }


@torch.inference_mode()
def measure(num_layers: int) -> dict[str, dict[str, float]]:
    """By the number of tokens: milliseconds of a layer both ways, and the seconds of the first compiled call."""
    weights = [_weights() for _ in range(num_layers)]
    ours = [(layer.head, layer.tail) for layer in map(Ours, weights)]
    compiled = [(torch.compile(Head(one)), torch.compile(Tail(one))) for one in weights]

    def run(layers: list[Any], inputs: list[Tensor]) -> None:
        hidden, residual, attended, cos, sin = inputs
        for head, tail in layers:
            head(hidden, cos, sin)
            hidden, residual = tail(attended, residual)

    found: dict[str, dict[str, float]] = {}
    for count in (1, 8, 32, 512):
        inputs = [torch.randn(count, width).bfloat16() for width in (HIDDEN, HIDDEN, QUERY_HEADS * HEAD_DIM)]
        inputs += [torch.randn(count, HEAD_DIM), torch.randn(count, HEAD_DIM)]
        start = time.process_time()
        run(compiled, inputs)
        first_s = time.process_time() - start
        ways: dict[str, Callable[[], None]] = {
            "ours": lambda inputs=inputs: run(ours, inputs),  # type: ignore[misc]
            "compiled": lambda inputs=inputs: run(compiled, inputs),  # type: ignore[misc]
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(12 if count == 512 else 40):
            for name, way in ways.items():
                start = time.process_time()
                way()
                times[name].append(time.process_time() - start)
        layer_ms = {name: 1e3 * statistics.median(values[3:]) / num_layers for name, values in times.items()}
        gain = 1 - layer_ms["compiled"] / layer_ms["ours"]
        found[str(count)] = {name: round(value, 3) for name, value in layer_ms.items()}
        found[str(count)] |= {"gain": round(gain, 3), "first_call_cpu_s": round(first_s, 1)}
        print(count, found[str(count)], flush=True)
    return found


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._inductor.config.freezing = True
    content = {
        "command": f"python -m benchmarks.compile_cpu --layers {options.layers}",
        "processor": processor_name(),
        "torch": torch.__version__,
        "by_tokens": measure(options.layers),
    }
    write(options.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
