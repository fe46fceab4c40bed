"""Our operators beside torch's own calls: the parts ``attention`` and ``sampling`` of ``benchmarks.gpu``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_timing import call_ms, run_ms
from device.base import AttentionOps, AttnMeta, Device
from device.cuda import make_ops
from device.ops.cuda import attend_dense
from device.ops.plain import PlainOps
from epd_serve.engine.sampling.sampler import DrawNumbers, Row, draw
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams

#: Heads of Qwen2.5-VL-7B, and its widths.
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED_FORWARD, VOCABULARY = 28, 4, 128, 3584, 18944, 151936
BLOCK_SIZE, SCALE = 16, HEAD_DIM**-0.5
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
#: Batch and context; tokens that are written; (prompts, new tokens of each, context of each); patches of images.
DECODES, _TINY_DECODES = [(1, 8192), (8, 8192), (64, 2048), (64, 8192)], [(2, 64)]
WRITES, _TINY_WRITES = [64, 8192, 131072], [64]
PROMPTS = [(1, 1008, 1008), (1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192), (1, 2048, 8192)]
_TINY_PROMPTS = [(2, 16, 32)]
TOWERS, _TINY_TOWERS = [[4096], [64] * 64, [1024, 576, 2500]], [[16] * 2, [16, 36]]
TOKENS, _TINY_TOKENS = (64, 4096), (8,)
#: Bytes that a measurement goes over: many times the L2 cache, so that they come from memory.
_ENOUGH_BYTES, _TINY_BYTES = 1 << 29, 1 << 16
DRAWS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
}


def measure_attention(
    device: Device, limits: Mapping[str, float], *, tiny: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each operator: bytes a second, or milliseconds, ours and torch's."""
    for batch, context in _TINY_DECODES if tiny else DECODES:
        layer_bytes = 2 * batch * context * KV_HEADS * HEAD_DIM * 2
        calls = [_attend(device, [1] * batch, [context] * batch) for _ in range(_layers(layer_bytes, tiny=tiny))]
        speed = layer_bytes / call_ms(device, calls) / 1e6
        yield f"decode {batch} x {context}", {"gb_s": speed, "of_copy": speed / limits["copy_gb_s"]}
    device.ops.build_plans(8192, (HEADS, KV_HEADS), HEAD_DIM, torch.bfloat16, device.torch_device)
    varlen = make_ops(device.cores or 1, (8, 0)) if device.type == "cuda" else device.ops
    for count, length, context in _TINY_PROMPTS if tiny else PROMPTS:
        ours, theirs = (_attend(device, [length] * count, [context] * count, ops) for ops in (device.ops, varlen))
        row = {"ours": call_ms(device, [ours]), "varlen": call_ms(device, [theirs])}
        row |= _sdpa(device, count, length, context) | {"largest difference": _difference(ours, theirs)}
        yield f"{count} x {length} of {context}", row
    for head_dim in (64, 72, 80):
        for lengths in _TINY_TOWERS if tiny else TOWERS:
            name = f"tower, heads of {head_dim}, {len(lengths)} of {lengths[0]} patches"
            yield name, _tower_ms(device, varlen, lengths, head_dim)
    for tokens in _TINY_WRITES if tiny else WRITES:
        speeds = [_write_gb_s(device, ops, tokens, tiny=tiny) for ops in (device.ops, PlainOps())]
        row = {"gb_s": speeds[0], "of_copy": speeds[0] / limits["copy_gb_s"], "torch_gb_s": speeds[1]}
        yield f"write {tokens} tokens", row
    for tokens in _TINY_TOKENS if tiny else TOKENS:
        ours_by_name, torchs = (layer_calls(ops, tokens, device.torch_device) for ops in (device.ops, PlainOps()))
        for name, call in ours_by_name.items():
            row = {"ours": call_ms(device, [call] * 8), "torch": call_ms(device, [torchs[name]] * 8)}
            yield f"{name}, {tokens} tokens", row


def _tower_ms(device: Device, varlen: AttentionOps, lengths: list[int], head_dim: int) -> dict[str, float]:
    """Return the milliseconds of the varlen kernel, and of cuDNN: segment by segment, or equal ones together."""
    query, key, value = _random(device.torch_device, 3, sum(lengths), 16, head_dim).unbind(0)
    calls = [(len(lengths), lengths[0])] if len(set(lengths)) == 1 else [(1, length) for length in lengths]
    dense = partial(attend_dense, query, key, value, calls, head_dim**-0.5, causal=False)
    began = time.perf_counter()
    dense()
    device.synchronize()
    first_ms = 1e3 * (time.perf_counter() - began)
    encode = partial(varlen.encode, query, key, value, list(accumulate(lengths, initial=0)), head_dim**-0.5)
    times = {"varlen": call_ms(device, [encode]), "cudnn": call_ms(device, [dense])}
    return times | {"cudnn's first call": first_ms, "largest difference": _difference(dense, encode)}


def _difference(left: Callable[[], Tensor], right: Callable[[], Tensor]) -> float:
    return (left() - right()).abs().max().item()


def _layers(layer_bytes: int, *, tiny: bool) -> int:
    return max(2, min(28, (_TINY_BYTES if tiny else _ENOUGH_BYTES) // layer_bytes))


def _random(where: torch.device, *shape: int) -> Tensor:
    own = where if where.type == "cuda" else None  # a host takes seconds for what a GPU makes at once
    return torch.randn(shape, device=own).to(where, torch.bfloat16)


def _attend(
    device: Device, queries: list[int], contexts: list[int], ops: AttentionOps | None = None
) -> Callable[[], Tensor]:
    """Return one layer's attention of sequences whose K and V lie in shuffled blocks: decodes, or prompts."""
    torch.manual_seed(0)
    where, blocks = device.torch_device, sum(contexts) // BLOCK_SIZE
    kv = _random(where, 2, blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    fused = _random(where, sum(queries), HEADS + 2 * KV_HEADS, HEAD_DIM)
    table = (torch.randperm(blocks).view(len(contexts), -1) + 1).to(where, torch.int32)
    every = (table[:, :, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=where)).flatten(1)
    num_decodes = len(queries) if queries[0] == 1 else 0
    meta = AttnMeta(
        block_size=BLOCK_SIZE,
        slot_mapping=every[:, contexts[0] - queries[0] :].flatten(),
        num_decodes=num_decodes,
        decode_block_table=table[:num_decodes],
        decode_context_lens=torch.tensor(contexts[:num_decodes], dtype=torch.int64).to(where),
        decode_context_lens_host=contexts[:num_decodes],
        prefill_query_lens=queries[num_decodes:],
        prefill_context_lens=contexts[num_decodes:],
        prefill_block_table=table[num_decodes:],
    )
    ops = ops or device.ops
    plan: Any = ops.prepare(meta, torch.bfloat16)
    query, key, value = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return partial(ops.attend, query, key, value, kv, plan, SCALE)


def _sdpa(device: Device, count: int, length: int, context: int) -> dict[str, float]:
    """Return the milliseconds of each SDPA backend that takes a batch of prompts, K and V already gathered."""
    where = device.torch_device
    query = _random(where, count, HEADS, length, HEAD_DIM)
    key, value = _random(where, 2, count, KV_HEADS, context, HEAD_DIM).unbind(0)
    mask = None
    if length != context:
        hidden = torch.ones(length, context, dtype=torch.bool, device=where).triu(context - length + 1)
        mask = query.new_zeros(length, context).masked_fill_(hidden, float("-inf"))
    options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": True}
    times: dict[str, float] = {}
    for name, backend in BACKENDS.items():

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, **options)

        try:
            call()
        except RuntimeError:  # SDPA's way to say that a backend takes no such shape
            continue
        times[name] = call_ms(device, [call])
    return times


def _write_gb_s(device: Device, ops: AttentionOps, tokens: int, *, tiny: bool) -> float:
    """Return the bytes read and written a second by write_kv, out of a fused projection to shuffled blocks."""
    where = device.torch_device
    fused = _random(where, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    key, value = fused[:, HEADS:-KV_HEADS], fused[:, -KV_HEADS:]
    moved, blocks = 4 * key.numel() * key.element_size(), tokens // BLOCK_SIZE
    shape = (_layers(moved, tiny=tiny), 2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    kv = torch.empty(shape, dtype=key.dtype, device=where)
    slots = (torch.randperm(blocks)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(where)
    return moved / call_ms(device, [partial(ops.write_kv, key, value, layer, slots) for layer in kv]) / 1e6


def layer_calls(ops: AttentionOps, tokens: int, where: torch.device) -> dict[str, Callable[[], object]]:
    """Return the operators between the matrix products of Qwen2.5-VL-7B's language model, by name."""
    hidden, residual = _random(where, 2, tokens, HIDDEN).unbind(0)
    weight = _random(where, HIDDEN)
    fused = _random(where, tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    query, key = fused[:, :HEADS], fused[:, HEADS : HEADS + KV_HEADS]
    cos, sin = torch.rand(2, tokens, HEAD_DIM).to(where).unbind(0)
    return {
        "rms_norm": partial(ops.rms_norm, hidden, weight, 1e-6),
        "add_rms_norm": partial(ops.add_rms_norm, hidden, residual, weight, 1e-6),
        "rotary": partial(ops.rotary, query, key, cos, sin),
        "swiglu": partial(ops.swiglu, _random(where, tokens, 2 * FEED_FORWARD)),
    }


def measure_sampling(device: Device, *, tiny: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield milliseconds of a batch's draws, by rows and limits: from a sorted vocabulary, and by our kernel."""
    numbers = DrawNumbers()
    for count in (4,) if tiny else (64, 256):
        scores = 4 * torch.randn(count, 1000 if tiny else VOCABULARY).to(device.torch_device)
        for name, limits in DRAWS.items():
            rows = [_row(seed, **limits) for seed in range(count)]
            times = {"sorted": run_ms(device, partial(draw, scores, rows))}
            if device.ops.draw is not None:
                call = partial(device.ops.draw, scores, *numbers.of(rows, scores.device))
                times["ours"] = call_ms(device, [call] * 8)
            yield f"{count} rows, {name}", times


def _row(seed: int, **limits: Any) -> Row:
    sampling = SamplingParams(temperature=1.0, seed=seed, **limits)
    return Row(Sequence(request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=9, positions=None), 0)
