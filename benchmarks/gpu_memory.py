"""The operators that memory bandwidth bounds: the cache's write and the paged decode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.accelerator import Target
from benchmarks.gpu_timing import graph_ms
from device.base import AttentionOps, Device
from device.ops import triton_decode
from device.ops.plain import PlainOps

KV_HEADS, QUERY_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 32, 128, 16
DECODES = [(1, 2048), (1, 8192), (8, 2048), (8, 8192), (64, 2048), (64, 8192)]
REQUIRED = (64, 2048)
"""Batch and context that must reach 80 % of the copy."""
WRITES = [64, 8192, 131072]
_ENOUGH_BYTES = 1 << 29
"""Per measurement: many times the L2 cache, so that it comes from memory."""


class PagedBatch:
    """Decodes of one context length over a cache of shuffled blocks, with enough layers to leave no data in L2."""

    def __init__(self, batch: int, context: int, where: torch.device) -> None:
        blocks = batch * context // BLOCK_SIZE
        self.layer_bytes = 2 * batch * context * KV_HEADS * HEAD_DIM * 2
        layers = max(2, min(28, _ENOUGH_BYTES // self.layer_bytes))
        shape = (layers, 2, blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.kv = torch.empty(shape, dtype=torch.bfloat16, device=where).normal_()
        self.query = torch.randn(batch, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=where)
        self.table = torch.randperm(blocks, device=where).view(batch, -1) + 1
        self.lengths = torch.full((batch,), context, dtype=torch.int64, device=where)

    def gb_s(
        self, cores: int, config: triton_decode.DecodeConfig | None = None, splits: int | None = None
    ) -> float:
        """Bytes of K and V a second."""
        fixed = (self.table, self.lengths, HEAD_DIM**-0.5)
        chosen: dict[str, Any] = {"cores": cores, "config": config, "splits": splits}
        calls = [partial(triton_decode.paged_decode, self.query, layer, *fixed, **chosen) for layer in self.kv]
        return self.layer_bytes / graph_ms(calls) / 1e6


def measure_decode(device: Device, copy_gb_s: float) -> tuple[dict[str, Any], list[Target]]:
    """Paged decode over batch and context; the share of the copy's bandwidth."""
    cores = device.cores
    assert cores is not None
    results: dict[str, Any] = {}
    for batch, context in DECODES:
        speed = PagedBatch(batch, context, device.torch_device).gb_s(cores)
        results[f"{batch} x {context}"] = {"gb_s": speed, "of_copy": speed / copy_gb_s}
    target = Target(
        name=f"paged decode {REQUIRED[0]} x {REQUIRED[1]}, share of copy bandwidth",
        measured=results[f"{REQUIRED[0]} x {REQUIRED[1]}"]["of_copy"],
        required=0.8,
        at_least=True,
    )
    return results, [target]


def measure_write(device: Device, copy_gb_s: float) -> tuple[dict[str, Any], list[Target]]:
    """write_kv of tokens out of a fused projection to shuffled blocks; bytes read and written."""
    results: dict[str, Any] = {}
    for tokens in WRITES:
        ours, torchs = (_write_gb_s(ops, tokens, device.torch_device) for ops in (device.ops, PlainOps()))
        results[f"{tokens} tokens"] = {"gb_s": ours, "of_copy": ours / copy_gb_s, "torch_gb_s": torchs}
    target = Target(
        name=f"write_kv of {WRITES[-1]} tokens, share of copy bandwidth",
        measured=results[f"{WRITES[-1]} tokens"]["of_copy"],
        required=0.7,
        at_least=True,
    )
    return results, [target]


def _write_gb_s(ops: AttentionOps, tokens: int, where: torch.device) -> float:
    fused = torch.randn(tokens, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=where)
    key, value = fused[:, QUERY_HEADS:-KV_HEADS], fused[:, -KV_HEADS:]
    moved = 4 * key.numel() * key.element_size()
    layers, blocks = max(1, min(64, _ENOUGH_BYTES // moved)), tokens // BLOCK_SIZE
    kv = torch.empty(layers, 2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=key.dtype, device=where)
    # Whole blocks in any order, as the block pool hands them out.
    starts = torch.randperm(blocks, device=where)[:, None] * BLOCK_SIZE
    slots = (starts + torch.arange(BLOCK_SIZE, device=where)).flatten()
    return moved / graph_ms([partial(ops.write_kv, key, value, layer, slots) for layer in kv]) / 1e6


def tune_decode(device: Device, copy_gb_s: float) -> list[dict[str, Any]]:
    """The decode kernel's choices at 64 x 2048 and 8 x 2048, best first: what ``default_config`` should say."""
    cores = device.cores
    assert cores is not None
    large, small = (PagedBatch(batch, 2048, device.torch_device) for batch in (64, 8))
    rows: list[dict[str, Any]] = []
    for tile, num_warps, num_stages in TUNED:
        config = triton_decode.DecodeConfig(tile=tile, num_warps=num_warps, num_stages=num_stages)
        row: dict[str, Any] = {"tile": tile, "num_warps": num_warps, "num_stages": num_stages}
        for splits in (2, 4, 8):
            row[f"64 x 2048 in {splits}, of copy"] = large.gb_s(cores, config, splits) / copy_gb_s
        row["8 x 2048 in 16, of copy"] = small.gb_s(cores, config, 16) / copy_gb_s
        rows.append(row)
    return sorted(rows, key=lambda row: -max(value for name, value in row.items() if name.startswith("64")))


TUNED = [
    (tile, num_warps, num_stages)
    for tile in (32, 64, 128)
    for num_warps in (2, 4, 8)
    for num_stages in (2, 3, 4)
    if tile * (num_stages - 1) <= 256  # a multiprocessor's shared memory
]
"""Tile, warps and stages."""
