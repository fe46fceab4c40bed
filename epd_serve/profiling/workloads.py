"""Operators and stages of a size at which the device is busy: what is run side by side.

Stages are stacks of transformer layers from the engine's own operators, with the shapes that make them what they
are: a tower over image patches, a prompt, a batch of single tokens over long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttnMeta, Device
from epd_serve.cost.interference import Demand, Kind

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """``hidden`` is ``heads`` times the head dimension; bytes and tokens are those of one call."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int
    prompt_tokens: int
    patches: int
    decodes: int
    context: int
    stream_bytes: int

    @classmethod
    def for_device(cls, device_type: str) -> Sizes:
        """Calls of some 10 ms on a few CPU cores, of the shapes of an 8B model on an accelerator."""
        if device_type == "cpu":
            return cls(
                hidden=1024,
                heads=16,
                kv_heads=4,
                intermediate=2816,
                layers=4,
                prompt_tokens=192,
                patches=256,
                decodes=4,
                context=512,
                stream_bytes=64 << 20,
            )
        return cls(
            hidden=4096,
            heads=32,
            kv_heads=8,
            intermediate=12288,
            layers=4,
            prompt_tokens=2048,
            patches=4096,
            decodes=32,
            context=4096,
            stream_bytes=512 << 20,
        )


Call = Callable[[], object]


class Factory:
    """Builds calls on one device. Each owns its tensors: pairs share the device and no data."""

    def __init__(self, device: Device, dtype: torch.dtype, sizes: Sizes) -> None:
        self._device, self._dtype, self._sizes = device, dtype, sizes
        self._block_size = 128 if device.type == "npu" else 16

    def matmul(self) -> Call:
        x, weight = (
            self._random(self._sizes.prompt_tokens * 2, self._sizes.hidden),
            self._weight(self._sizes.intermediate),
        )
        return lambda: F.linear(x, weight)

    def attention_prefill(self) -> Call:
        tokens = self._sizes.prompt_tokens * 4
        return self._attention(self._meta(prefill=tokens), tokens)

    def attention_decode(self) -> Call:
        return self._attention(self._meta(decodes=self._sizes.decodes * 4), self._sizes.decodes * 4)

    def norm(self) -> Call:
        rows = self._sizes.stream_bytes // (self._sizes.hidden * self._dtype.itemsize)
        x, weight = self._random(rows, self._sizes.hidden), self._random(self._sizes.hidden)
        return lambda: self._device.ops.rms_norm(x, weight, _EPSILON)

    def copy(self) -> Call:
        source = self._random(self._sizes.stream_bytes // self._dtype.itemsize)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def encode(self) -> Call:
        """A tower: all patches of an image see each other."""
        sizes = self._sizes
        borders = [0, sizes.patches]
        head_dim = sizes.hidden // sizes.heads

        def attend(hidden: Tensor, qkv: Tensor) -> Tensor:
            query, key, value = F.linear(hidden, qkv).view(len(hidden), 3, sizes.heads, head_dim).unbind(1)
            return self._device.ops.encode(query, key, value, borders, head_dim**-0.5)

        return self._stack(sizes.patches, 3 * sizes.hidden, attend)

    def prefill(self) -> Call:
        return self._language(self._meta(prefill=self._sizes.prompt_tokens), self._sizes.prompt_tokens)

    def decode(self) -> Call:
        return self._language(self._meta(decodes=self._sizes.decodes), self._sizes.decodes)

    # ------------------------------------------------------------------ parts

    def _language(self, meta: AttnMeta, tokens: int) -> Call:
        sizes, ops = self._sizes, self._device.ops
        head_dim = sizes.hidden // sizes.heads
        plan, kv = ops.prepare(meta, self._dtype), self._cache(meta)

        def attend(hidden: Tensor, qkv: Tensor) -> Tensor:
            states = F.linear(hidden, qkv).view(tokens, sizes.heads + 2 * sizes.kv_heads, head_dim)
            query, key, value = torch.split(states, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
            ops.write_kv(key, value, kv, meta.slot_mapping)
            return ops.attend(query, key, value, kv, plan, head_dim**-0.5)

        return self._stack(tokens, (sizes.heads + 2 * sizes.kv_heads) * head_dim, attend)

    def _stack(self, tokens: int, width: int, attend: Callable[[Tensor, Tensor], Tensor]) -> Call:
        """``layers`` transformer layers over ``tokens`` rows; ``width`` is that of queries, keys and values."""
        sizes, ops = self._sizes, self._device.ops
        x, norm = self._random(tokens, sizes.hidden), self._random(sizes.hidden)
        layers = [
            (
                self._weight(width),
                self._weight(sizes.hidden),
                self._weight(2 * sizes.intermediate),
                self._random(sizes.hidden, sizes.intermediate) / math.sqrt(sizes.intermediate),
            )
            for _ in range(sizes.layers)
        ]

        def call() -> Tensor:
            residual = x
            for qkv, out, gate_up, down in layers:
                attended = attend(ops.rms_norm(residual, norm, _EPSILON), qkv)
                hidden, residual = ops.add_rms_norm(
                    F.linear(attended.reshape(tokens, -1), out), residual, norm, _EPSILON
                )
                residual = residual + F.linear(ops.swiglu(F.linear(hidden, gate_up)), down)
            return residual

        return call

    def _attention(self, meta: AttnMeta, tokens: int) -> Call:
        sizes, ops = self._sizes, self._device.ops
        head_dim = sizes.hidden // sizes.heads
        query = self._random(tokens, sizes.heads, head_dim)
        key, value = (self._random(tokens, sizes.kv_heads, head_dim) for _ in range(2))
        plan, kv = ops.prepare(meta, self._dtype), self._cache(meta)
        ops.write_kv(key, value, kv, meta.slot_mapping)
        return lambda: ops.attend(query, key, value, kv, plan, head_dim**-0.5)

    def _meta(self, *, decodes: int = 0, prefill: int = 0) -> AttnMeta:
        size = self._block_size
        lengths = [self._sizes.context] * decodes if decodes else [prefill]
        per_sequence = -(-max(lengths) // size)
        table = 1 + torch.arange(len(lengths) * per_sequence, dtype=torch.int32).view(len(lengths), per_sequence)
        first = [0] if prefill else [length - 1 for length in lengths]
        slots = [
            int(row[position // size]) * size + position % size
            for row, start, length in zip(table, first, lengths, strict=True)
            for position in range(start, length)
        ]
        empty, target = torch.zeros(0, 1, dtype=torch.int32), self._device.torch_device
        return AttnMeta(
            block_size=size,
            slot_mapping=torch.tensor(slots).to(target),
            num_decodes=decodes,
            decode_block_table=(table if decodes else empty).to(target),
            decode_context_lens=torch.tensor(lengths if decodes else [], dtype=torch.long).to(target),
            decode_context_lens_host=lengths if decodes else [],
            prefill_query_lens=[prefill] if prefill else [],
            prefill_context_lens=[prefill] if prefill else [],
            prefill_block_table=(table if prefill else empty).to(target),
        )

    def _cache(self, meta: AttnMeta) -> Tensor:
        tables = (meta.decode_block_table, meta.prefill_block_table)
        blocks = 1 + max(int(table.max()) for table in tables if table.numel())
        head_dim = self._sizes.hidden // self._sizes.heads
        return self._random(2, blocks, meta.block_size, self._sizes.kv_heads, head_dim)

    def _weight(self, rows: int) -> Tensor:
        return self._random(rows, self._sizes.hidden) / math.sqrt(self._sizes.hidden)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self._device.torch_device, self._dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadKind:
    """The workload behind a name.

    ``demand`` is the resource that the arithmetic intensity of its shapes waits for.
    """

    kind: Kind
    demand: Demand
    build: Callable[[Factory], Call]


WORKLOADS: dict[str, WorkloadKind] = {
    "matmul": WorkloadKind(kind="operator", demand="compute", build=Factory.matmul),
    "attention prefill": WorkloadKind(kind="operator", demand="compute", build=Factory.attention_prefill),
    "attention decode": WorkloadKind(kind="operator", demand="bandwidth", build=Factory.attention_decode),
    "norm": WorkloadKind(kind="operator", demand="bandwidth", build=Factory.norm),
    "copy": WorkloadKind(kind="operator", demand="bandwidth", build=Factory.copy),
    "E": WorkloadKind(kind="stage", demand="compute", build=Factory.encode),
    "P": WorkloadKind(kind="stage", demand="compute", build=Factory.prefill),
    "D": WorkloadKind(kind="stage", demand="bandwidth", build=Factory.decode),
}
