"""Prefill and vision attention against the best that torch itself does with the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_timing import call_ms, host_ms
from device.base import AttnMeta, Device
from device.ops.varlen import find_varlen

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 4, 128, 16
SCALE = HEAD_DIM**-0.5
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PROMPTS = {
    "1 prompt of 512": ([512], [512]),
    "1 prompt of 2048": ([2048], [2048]),
    "1 prompt of 8192": ([8192], [8192]),
    "4 prompts of 2048": ([2048] * 4, [2048] * 4),
    "2048 after 6144": ([2048], [8192]),
}
"""Query and context lengths."""
_TINY_PROMPTS = {"2 prompts of 32": ([32] * 2, [32] * 2), "16 after 16": ([16], [32])}
NEW_LENGTHS = [1280, 3328, 6400]
TOWERS = {"1 image of 4096": [4096], "64 windows of 64": [64] * 64, "images of 3 sizes": [1024, 576, 2500]}
_TINY_TOWERS = {"2 windows of 16": [16] * 2, "images of 2 sizes": [16, 36]}


def measure_prefill(device: Device, *, tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case in milliseconds, ours as a multiple of the best, and the error against float32."""
    for name, (queries, contexts) in (_TINY_PROMPTS if tiny else PROMPTS).items():
        case = _Prefill(queries, contexts, device.torch_device)
        ours = case.ours(device)
        times = _times(device, case.alternatives())
        mine = call_ms(device, [ours])
        error = float((ours().float() - case.exact()).abs().max())
        ratio = mine / min(times.values()) if times else None
        yield name, {"ms": {"ours": mine} | times, "ratio": ratio, "largest_error": error}
    if device.type == "cuda":
        more = {str(length): _new_length_ms(device, length) for length in NEW_LENGTHS}
        yield "cudnn, more for the first call of a length, ms", more


class _Prefill:
    """Chunks of prompts of one length, whose K and V lie in shuffled blocks."""

    def __init__(self, queries: list[int], contexts: list[int], where: torch.device) -> None:
        self.queries, self.contexts, self.where = queries, contexts, where
        width = QUERY_HEADS + 2 * KV_HEADS
        fused = torch.randn(sum(queries), width, HEAD_DIM).to(where, torch.bfloat16)
        self.query = fused[:, :QUERY_HEADS]
        self.key, self.value = fused[:, QUERY_HEADS:-KV_HEADS], fused[:, -KV_HEADS:]
        blocks = sum(contexts) // BLOCK_SIZE
        shape = (2, blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.kv_layer = torch.randn(shape).to(where, torch.bfloat16)
        self.table = (torch.randperm(blocks).view(len(contexts), -1) + 1).to(where, torch.int32)
        slots = (self.table[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=where)).flatten(1)
        self.slots = slots[:, contexts[0] - queries[0] :].flatten()
        stored = self.kv_layer.view(2, -1, KV_HEADS, HEAD_DIM)
        stored[0, self.slots], stored[1, self.slots] = self.key, self.value
        self.context = stored[:, slots.flatten()]

    def ours(self, device: Device) -> Callable[[], Tensor]:
        meta = AttnMeta(
            block_size=BLOCK_SIZE,
            slot_mapping=self.slots,
            num_decodes=0,
            decode_block_table=self.table[:0],
            decode_context_lens=self.table.new_zeros(0, dtype=torch.int64),
            decode_context_lens_host=[],
            prefill_query_lens=self.queries,
            prefill_context_lens=self.contexts,
            prefill_block_table=self.table,
        )
        plan = device.ops.prepare(meta, torch.bfloat16)
        return partial(device.ops.attend, self.query, self.key, self.value, self.kv_layer, plan, SCALE)

    def alternatives(self) -> dict[str, Callable[[], Tensor]]:
        """The same work by torch's calls, K and V already gathered; the prompts are one batch."""
        count, length, context = len(self.queries), self.queries[0], self.contexts[0]
        queries = self.query.reshape(count, length, QUERY_HEADS, HEAD_DIM).transpose(1, 2)
        keys, values = (part.view(count, context, KV_HEADS, HEAD_DIM).transpose(1, 2) for part in self.context)
        repeated = [part.repeat_interleave(QUERY_HEADS // KV_HEADS, 1) for part in (keys, values)]
        mask = None
        if length != context:
            hidden = torch.ones(length, context, dtype=torch.bool, device=self.where).triu(context - length + 1)
            mask = queries.new_zeros(length, context).masked_fill_(hidden, float("-inf"))
        found: dict[str, Callable[[], Tensor]] = {}
        for name, backend in BACKENDS.items():
            found[name] = partial(_sdpa, backend, queries, keys, values, mask)
            found[f"{name}, heads repeated"] = partial(_sdpa, backend, queries, repeated[0], repeated[1], mask)
        varlen = find_varlen()
        if varlen is not None:
            ends, lasts = (
                torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=self.where)
                for lengths in (self.queries, self.contexts)
            )
            packed = (self.query, self.context[0], self.context[1], ends, lasts, length, context)
            found["varlen"] = partial(varlen, *packed, scale=SCALE, causal=True)
        return found

    def exact(self) -> Tensor:
        """In float32, sequence by sequence and head by head."""
        outputs: list[Tensor] = []
        for i, (length, context) in enumerate(zip(self.queries, self.contexts, strict=True)):
            query = self.query[i * length : (i + 1) * length].float()
            keys, values = self.context[:, i * context : (i + 1) * context].float()
            hidden = torch.ones(length, context, dtype=torch.bool, device=self.where).triu(context - length + 1)
            heads = []
            for head in range(QUERY_HEADS):
                kv_head = head // (QUERY_HEADS // KV_HEADS)
                scores = query[:, head] @ keys[:, kv_head].T * SCALE
                heads.append(scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ values[:, kv_head])
            outputs.append(torch.stack(heads, dim=1))
        return torch.cat(outputs)


def measure_vision(device: Device, *, tiny: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield a tower's attention in milliseconds: 16 heads of the sizes in use, over images and windows."""
    for head_dim in (64, 72, 80):
        for name, lengths in (_TINY_TOWERS if tiny else TOWERS).items():
            shape = (3, sum(lengths), 16, head_dim)
            states = torch.randn(shape).to(device.torch_device, torch.bfloat16).unbind(0)
            borders, scale = list(accumulate(lengths, initial=0)), head_dim**-0.5
            times = {"ours": call_ms(device, [partial(device.ops.encode, *states, borders, scale)])}
            if len(set(lengths)) == 1:
                batched = [s.view(len(lengths), lengths[0], 16, head_dim).transpose(1, 2) for s in states]
                calls = {
                    label: partial(_sdpa, backend, *batched, None, causal=False)
                    for label, backend in BACKENDS.items()
                }
                times |= _times(device, calls)
            yield f"tower, heads of {head_dim}, {name}", times


def _sdpa(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = True
) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal and mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _times(device: Device, calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Milliseconds of each call that this torch has a kernel for."""
    times: dict[str, float] = {}
    for label, call in calls.items():
        try:
            call()
        except RuntimeError:  # SDPA's way to say that a backend takes no such shape
            continue
        times[label] = call_ms(device, [call])
    return times


def _new_length_ms(device: Device, length: int) -> float | None:
    """Milliseconds that a length new to cuDNN costs once; None where it takes no such shape."""
    query, key, value = (
        torch.randn(1, heads, length, HEAD_DIM).to(device.torch_device, torch.bfloat16)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    )
    call = partial(_sdpa, SDPBackend.CUDNN_ATTENTION, query, key, value, None)
    try:
        first = host_ms(device, call)
    except RuntimeError:
        return None
    return first - host_ms(device, call)
