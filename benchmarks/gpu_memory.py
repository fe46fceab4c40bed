"""The operators that memory bandwidth bounds: the cache's write and the paged decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import call_ms
from device.base import AttentionOps, AttnMeta, Device
from device.ops.plain import PlainOps

KV_HEADS, QUERY_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 32, 128, 16
#: Batch and context; tokens that are written.
DECODES, _TINY_DECODES = [(1, 2048), (1, 8192), (8, 2048), (8, 8192), (64, 2048), (64, 8192)], [(2, 64)]
WRITES, _TINY_WRITES = [64, 8192, 131072], [64]
#: Per measurement: many times the L2 cache, so that it comes from memory.
_ENOUGH_BYTES, _TINY_BYTES = 1 << 29, 1 << 16


def measure_decode(
    device: Device, limits: Mapping[str, float], *, tiny: bool
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield bytes of K and V a second of paged decode, and the share of the copy's bandwidth."""
    for batch, context in _TINY_DECODES if tiny else DECODES:
        layer_bytes = 2 * batch * context * KV_HEADS * HEAD_DIM * 2
        calls = _decode_calls(device, batch, context, _layers(layer_bytes, tiny=tiny))
        speed = layer_bytes / call_ms(device, calls) / 1e6
        yield f"decode {batch} x {context}", {"gb_s": speed, "of_copy": speed / limits["copy_gb_s"]}


def _layers(layer_bytes: int, *, tiny: bool) -> int:
    return max(2, min(28, (_TINY_BYTES if tiny else _ENOUGH_BYTES) // layer_bytes))


def _decode_calls(device: Device, batch: int, context: int, layers: int) -> list[Callable[[], object]]:
    """Decodes of one context length over a cache of shuffled blocks, a call for each layer."""
    where, blocks = device.torch_device, batch * context // BLOCK_SIZE
    shape = (2, blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    kv = [torch.empty(shape, dtype=torch.bfloat16, device=where).normal_() for _ in range(layers)]
    fused = torch.randn(batch, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM).to(where, torch.bfloat16)
    query, key, value = fused.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
    table = (torch.randperm(blocks).view(batch, -1) + 1).to(where, torch.int32)
    meta = AttnMeta(
        block_size=BLOCK_SIZE,
        slot_mapping=(table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1),
        num_decodes=batch,
        decode_block_table=table,
        decode_context_lens=torch.full((batch,), context).to(where),
        decode_context_lens_host=[context] * batch,
        prefill_query_lens=[],
        prefill_context_lens=[],
        prefill_block_table=table[:0],
    )
    plan: Any = device.ops.prepare(meta, torch.bfloat16)
    return [partial(device.ops.attend, query, key, value, layer, plan, HEAD_DIM**-0.5) for layer in kv]


def measure_write(
    device: Device, limits: Mapping[str, float], *, tiny: bool
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield bytes read and written a second by write_kv, out of a fused projection to shuffled blocks."""
    for tokens in _TINY_WRITES if tiny else WRITES:
        ours, torchs = (_write_gb_s(device, ops, tokens, tiny=tiny) for ops in (device.ops, PlainOps()))
        row = {"gb_s": ours, "of_copy": ours / limits["copy_gb_s"], "torch_gb_s": torchs}
        yield f"write {tokens} tokens", row


def _write_gb_s(device: Device, ops: AttentionOps, tokens: int, *, tiny: bool) -> float:
    where = device.torch_device
    fused = torch.randn(tokens, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM).to(where, torch.bfloat16)
    key, value = fused[:, QUERY_HEADS:-KV_HEADS], fused[:, -KV_HEADS:]
    moved, blocks = 4 * key.numel() * key.element_size(), tokens // BLOCK_SIZE
    kv = torch.empty(
        _layers(moved, tiny=tiny), 2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=key.dtype, device=where
    )
    # Whole blocks in any order, as the block pool hands them out.
    slots = (torch.randperm(blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(where)
    return moved / call_ms(device, [partial(ops.write_kv, key, value, layer, slots) for layer in kv]) / 1e6
