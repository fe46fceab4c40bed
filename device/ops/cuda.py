"""NVIDIA attention from torch alone: flash attention for prompts and vision, plain torch for decodes.

If Triton is installed, ``device.ops.triton_ops`` adds the paged decode kernel and fused layer operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionPlan, AttnMeta
from device.ops.plain import PlainOps
from device.ops.varlen import MAX_HEAD_DIM, flashable

DENSE_TOKENS = 2048
"""Length from which whole prompts use SDPA: cuDNN halves the varlen kernel's time at 8192 tokens on an H100."""
DENSE_MULTIPLE = 1024
"""These prompts are padded at the end, hidden by causality, to a multiple of this: cuDNN needs a plan per length,
built by :meth:`CudaOps.build_plans` before an instance serves."""
LONG_SEGMENT = 1024
"""Tower segments of at least this length fill the GPU one by one, so images of one size share a plan."""
PLAN_OPERATIONS = 2.5e13
"""Operations after which a tower's calls of one shape use cuDNN: by then it has saved about the 47 ms
that a plan took on an H100 (benchmarks.gpu, attention). Rare sizes never cost a plan."""
_MAX_CUDNN_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPrefills:
    """A step's prefill chunks as one varlen call."""

    query_ends: Tensor
    context_ends: Tensor
    max_query: int
    max_context: int
    slots: Tensor | None
    """[sum of contexts] cache slots, sequence by sequence; None if every chunk is its whole context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DensePrefills:
    """Long prompts without history, one SDPA call each."""

    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaPlan(AttentionPlan):
    """The computation chosen for each half of a step, decodes and prefills; an AttentionPlan means PlainOps."""

    decodes: AttentionPlan | None
    """Plan of the decodes; None without decodes, or if the kernel needs no plan."""
    prefills: PackedPrefills | DensePrefills | AttentionPlan | None


class CudaOps(PlainOps):
    """AttentionOps without Triton.

    Args:
        varlen: flash attention (:func:`device.ops.varlen.varlen`); None uses SDPA, as float32 always does.
        has_fast_cudnn: cuDNN is faster than ``varlen``, as on Hopper.
    """

    name = "varlen flash prefill, plain torch decode (Triton is not installed)"

    def __init__(self, varlen: Callable[..., Tensor] | None, *, has_fast_cudnn: bool = False) -> None:
        self._varlen = varlen
        self._has_fast_cudnn = has_fast_cudnn and varlen is not None
        self._has_plans = False  # for prompts
        self._operations: Counter[tuple[int, ...]] = Counter()  # of a tower's calls, by shape
        if varlen is None:
            self.name = "plain torch (this GPU has no varlen flash attention)"

    def build_plans(
        self,
        max_num_tokens: int,
        num_heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        is_dense = self._has_fast_cudnn and dtype != torch.float32 and _fits_cudnn(head_dim)
        if not is_dense or max_num_tokens < DENSE_TOKENS:
            return
        for length in range(DENSE_TOKENS, max_num_tokens + DENSE_MULTIPLE, DENSE_MULTIPLE):
            query, key, value = (
                torch.zeros(length, heads, head_dim, dtype=dtype, device=device)
                for heads in (num_heads[0], num_heads[1], num_heads[1])
            )
            attend_dense(query, key, value, [(1, length)], head_dim**-0.5, causal=True)
        self._has_plans = True

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> CudaPlan:  # type: ignore[override]
        prefills: PackedPrefills | DensePrefills | AttentionPlan | None = None
        if meta.prefill_query_lens:
            if self._varlen is None or dtype == torch.float32:
                prefills = super().prepare(_prefills_only(meta), dtype)
            elif (
                self._has_plans
                and meta.prefill_query_lens == meta.prefill_context_lens
                and min(meta.prefill_query_lens) >= DENSE_TOKENS
            ):
                prefills = DensePrefills(lengths=tuple(meta.prefill_query_lens))
            else:
                prefills = _pack(meta)
        decodes = self._prepare_decodes(meta, dtype) if meta.num_decodes else None
        return CudaPlan(meta=meta, decodes=decodes, prefills=prefills)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        assert isinstance(plan, CudaPlan), "a plan serves the operators that prepared it"
        count = plan.meta.num_decodes
        halves: list[Tensor] = []
        if count:
            halves.append(self._decode_step(query[:count], kv_layer, plan, scale))
        if plan.prefills is not None:
            halves.append(self._prefill(query[count:], key[count:], value[count:], kv_layer, plan.prefills, scale))
        if not halves:
            return query.new_empty(query.shape)
        return halves[0].contiguous() if len(halves) == 1 else torch.cat(halves)

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        if not len(query) or self._varlen is None or query.dtype == torch.float32:
            return super().encode(query, key, value, cu_seqlens_host, scale)
        borders = tuple(dict.fromkeys(cu_seqlens_host))  # drops empty segments
        longest, calls = _segments(borders)
        if calls and self._has_fast_cudnn and self._pays(calls, query):
            return attend_dense(query, key, value, calls, scale, causal=False)
        ends = _ends(borders, query.device, _current_stream(query.device))
        return self._flash(query, key, value, (ends, ends), (longest, longest), scale, causal=False).contiguous()

    def _pays(self, calls: Sequence[tuple[int, int]], query: Tensor) -> bool:
        """Return whether such calls were frequent enough to pay for cuDNN plans (PLAN_OPERATIONS)."""
        heads, head_dim = query.shape[1:]
        if not _fits_cudnn(head_dim):
            return False
        for count, length in calls:
            self._operations[count, length, heads, head_dim] += 4 * count * heads * length**2 * head_dim
        return all(self._operations[*call, heads, head_dim] >= PLAN_OPERATIONS for call in calls)

    def _prepare_decodes(self, meta: AttnMeta, dtype: torch.dtype) -> AttentionPlan | None:
        return super().prepare(_decodes_only(meta), dtype)

    def _decode_step(self, query: Tensor, kv_layer: Tensor, plan: CudaPlan, scale: float) -> Tensor:
        """Attend from the step's first ``num_decodes`` tokens [B, Hq, D]."""
        assert plan.decodes is not None
        # A decode's own K and V are read from the cache.
        return super().attend(query, query, query, kv_layer, plan.decodes, scale)

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_layer: Tensor,
        prefills: PackedPrefills | DensePrefills | AttentionPlan,
        scale: float,
    ) -> Tensor:
        """Attend from the step's chunks, back to back."""
        if isinstance(prefills, DensePrefills):
            return _attend_prompts(query, key, value, prefills.lengths, scale)
        if not isinstance(prefills, PackedPrefills):
            return super().attend(query, key, value, kv_layer, prefills, scale)
        if prefills.slots is not None:
            key, value = _gather(kv_layer, prefills.slots)
        ends, longest = (prefills.query_ends, prefills.context_ends), (prefills.max_query, prefills.max_context)
        return self._flash(query, key, value, ends, longest, scale, causal=True)

    def _flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scale: float,
        *,
        causal: bool,
    ) -> Tensor:
        """Call varlen with the ends and longest lengths of (queries, keys)."""
        assert self._varlen is not None
        head_dim = query.shape[-1]
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head size {head_dim}: flash attention supports at most {MAX_HEAD_DIM}")
        query, key, value = (flashable(states) for states in (query, key, value))
        output = self._varlen(query, key, value, *ends, *longest, scale=scale, causal=causal)
        return output[..., :head_dim]


def _pack(meta: AttnMeta) -> PackedPrefills:
    """Pack a step's prefill chunks from host lists alone, without reading from the device.

    Pages are gathered, because varlen's ``block_table`` (torch 2.13) requires pages of a multiple of 256 tokens.
    """
    device = meta.prefill_block_table.device
    queries, contexts = meta.prefill_query_lens, meta.prefill_context_lens
    query_ends = _to_device(list(accumulate(queries, initial=0)), device)
    context_ends, slots = query_ends, None
    if queries != contexts:
        context_ends = _to_device(list(accumulate(contexts, initial=0)), device)
        total = sum(contexts)
        owners = torch.repeat_interleave(
            torch.arange(len(contexts), device=device), context_ends.diff(), output_size=total
        )
        positions = torch.arange(total, device=device) - context_ends[owners]
        blocks = meta.prefill_block_table[owners, positions // meta.block_size]
        slots = blocks * meta.block_size + positions % meta.block_size
    return PackedPrefills(
        query_ends=query_ends,
        context_ends=context_ends,
        max_query=max(queries),
        max_context=max(contexts),
        slots=slots,
    )


def _gather(kv_layer: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of the slots, [len(slots), Hkv, D] each."""
    keys, values = kv_layer.view(2, -1, *kv_layer.shape[3:]).index_select(1, slots).unbind(0)
    return keys, values


def _attend_prompts(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attend within whole prompts, back to back."""
    outputs: list[Tensor] = []
    start = 0
    for length in lengths:
        missing = -length % DENSE_MULTIPLE
        # one fixed layout for every model: plans depend on strides
        queries, keys, values = (
            F.pad(states, (0, 0, 0, 0, 0, missing)) if missing else states.contiguous()
            for states in (part[start : start + length] for part in (query, key, value))
        )
        attended = attend_dense(queries, keys, values, [(1, length + missing)], scale, causal=True)
        outputs.append(attended[:length])
        start += length
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[tuple[int, int]], scale: float, *, causal: bool
) -> Tensor:
    """Attend [T, H, D] within back-to-back segments, by one SDPA call per (segments, their length)."""
    outputs: list[Tensor] = []
    start = 0
    is_cudnn = query.is_cuda and _fits_cudnn(query.shape[2])
    for count, length in calls:
        end = start + count * length
        queries, keys, values = (
            states[start:end].view(count, length, *states.shape[1:]).transpose(1, 2)
            for states in (query, key, value)
        )
        if is_cudnn:
            # torch's backend order is global to the process: cuDNN would plan every length of masked decodes
            attended: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
                queries, keys, values, None, False, 0.0, causal, scale=scale
            )[0]
        else:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
        start = end
    return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)


def _fits_cudnn(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= _MAX_CUDNN_HEAD_DIM


def _segments(borders: tuple[int, ...]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the longest segment, and SDPA calls (segments, length); no calls if segments are short and differ."""
    lengths = [end - start for start, end in pairwise(borders)]
    if min(lengths) >= LONG_SEGMENT:
        return max(lengths), tuple((1, length) for length in lengths)
    if min(lengths) == max(lengths):
        return lengths[0], ((len(lengths), lengths[0]),)
    return max(lengths), ()


def _prefills_only(meta: AttnMeta) -> AttnMeta:
    return replace(
        meta,
        num_decodes=0,
        slot_mapping=meta.slot_mapping[meta.num_decodes :],
        decode_block_table=meta.decode_block_table[:0],
        decode_context_lens=meta.decode_context_lens[:0],
        decode_context_lens_host=[],
    )


def _decodes_only(meta: AttnMeta) -> AttnMeta:
    return replace(
        meta,
        slot_mapping=meta.slot_mapping[: meta.num_decodes],
        prefill_query_lens=[],
        prefill_context_lens=[],
        prefill_block_table=meta.prefill_block_table[:0],
    )


@lru_cache(maxsize=16)
def _ends(ends: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return the ends on the device, cached per ``stream`` because every tower layer needs the same ends."""
    return _to_device(list(ends), device)


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _to_device(values: list[int] | Tensor, device: torch.device) -> Tensor:
    """Return an int32 tensor, copied without blocking the host."""
    host = torch.as_tensor(values, dtype=torch.int32)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
