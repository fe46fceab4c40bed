"""Transformer operators on Ascend NPUs, through torch_npu's fused kernels.

One attention kernel, npu_fused_infer_attention_score_v2, serves chunks and decodes (paged) and the vision tower
(unpaged). tests/ascend checks every call against the constraints in torch_npu's documentation, without an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionOps, AttentionPlan, AttnMeta

Layout = Literal["TND", "BSND"]

_MASK_SIZE = 2048  # required by sparse modes 2 to 4 for any context length
_UNMASKED, _CAUSAL = 0, 3  # sparse modes: no mask at all; causal, the last query at the end of its context
_TND_HEAD_DIMS = (128, 192)
_MAX_HEAD_DIM = 512  # for BSND; heads are multiples of 32 bytes
_MAX_BLOCK_SIZE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One call of the paged kernel over some of the step's sequences."""

    tokens: slice
    batch: int
    """Sequences; with BSND the query is [batch, tokens / batch, Hq, D]."""
    query_lens: list[int]
    """Ends in the packed tokens with TND, lengths with BSND."""
    context_lens: list[int]
    """Per sequence: the kernel's paged lengths are not cumulative."""
    block_table: Tensor
    """[batch, max_blocks] int32."""
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AscendPlan(AttentionPlan):
    """The calls of every layer, by layout, created lazily by the first layer."""

    calls: dict[Layout, list[_Call]]


class AscendOps(AttentionOps):
    """torch_npu's operators with paged attention.

    torch_npu's documentation contradicts itself on TND with pages on A2 and A3: the lists of layouts exclude it,
    but the sections on page attention, grouped heads and lengths describe it, and vLLM's Ascend backend uses it.
    TND is therefore the default: one call for the decodes, one for the chunks. BSND, allowed everywhere, is the
    fallback: one call for the decodes, one for each chunk. Head dimensions that TND rejects use BSND.

    A captured decode step needs nothing more: torch_npu records the attention calls during capture
    (:class:`device.ascend.NPUGraphRunner`), and replays the decode call with other ``actual_seq_kvlen``.
    """

    def __init__(self, *, layout: Layout = "TND") -> None:
        self.layout: Layout = layout
        self.name = f"npu_fused_infer_attention_score_v2, {layout}"
        self._masks: dict[torch.device, Tensor] = {}

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> AscendPlan:
        """Return a plan of host lists and the mask. Raises ValueError for an unsupported block size."""
        _check_block_size(meta.block_size, has_chunks=bool(meta.prefill_query_lens))
        return AscendPlan(meta=meta, calls={})

    def _layout_for(self, kv_layer: Tensor) -> Layout:
        """Return the layout for these heads. Raises ValueError if no layout supports them."""
        head_dim = kv_layer.shape[-1]
        if kv_layer.device.type != "npu" or (self.layout == "TND" and head_dim in _TND_HEAD_DIMS):
            return self.layout
        if head_dim > _MAX_HEAD_DIM or head_dim * kv_layer.element_size() % 32:
            raise ValueError(
                f"heads of {head_dim} dimensions: an NPU's paged attention supports multiples of 16 up to "
                f"{_MAX_HEAD_DIM}"
            )
        return "BSND"

    def _calls(self, meta: AttnMeta, layout: Layout) -> list[_Call]:
        calls: list[_Call] = []
        if meta.num_decodes:
            lens, table = meta.decode_context_lens_host, meta.decode_block_table
            # A single token sees its whole context, so decodes need no mask.
            calls.append(_call(layout, 0, [1] * meta.num_decodes, lens, table, mask=None))
        query_lens, context_lens, table = (
            meta.prefill_query_lens,
            meta.prefill_context_lens,
            meta.prefill_block_table,
        )
        if not query_lens:
            return calls
        mask = self._causal_mask(table.device)
        if layout == "TND":
            return [*calls, _call(layout, meta.num_decodes, query_lens, context_lens, table, mask=mask)]
        start = meta.num_decodes
        for i, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
            calls.append(_call(layout, start, [query_len], [context_len], table[i : i + 1], mask=mask))
            start += query_len
        return calls

    def _causal_mask(self, device: torch.device) -> Tensor:
        if device not in self._masks:
            hidden = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool).triu_(1)
            self._masks[device] = hidden.to(device)
        return self._masks[device]

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        keys, values = kv_layer.unbind(0)
        torch.ops.npu.npu_scatter_pa_kv_cache(
            key.contiguous(), value.contiguous(), keys, values, slot_mapping, cache_mode="Norm"
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        assert isinstance(plan, AscendPlan), "a plan serves the operators that prepared it"
        layout = self._layout_for(kv_layer)
        if layout not in plan.calls:
            plan.calls[layout] = self._calls(plan.meta, layout)
        keys, values = kv_layer.flatten(3).unbind(0)
        outputs: list[Tensor] = []
        for call in plan.calls[layout]:
            queries = query[call.tokens]
            if layout == "BSND":
                queries = queries.reshape(call.batch, -1, *query.shape[1:])
            attended = self._attention(
                queries,
                keys,
                values,
                layout=layout,
                num_kv_heads=kv_layer.shape[3],
                query_lens=call.query_lens,
                context_lens=call.context_lens,
                scale=scale,
                block_table=call.block_table,
                block_size=plan.meta.block_size,
                atten_mask=call.mask,
            )
            outputs.append(attended.flatten(0, 1) if layout == "BSND" else attended)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else query.new_empty(query.shape)

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        """Compute tower attention as in the protocol, padding heads with zeros to dimensions that TND supports."""
        if not len(query):
            return query.new_empty(query.shape)
        head_dim = query.shape[-1]
        padded = next((dim for dim in _TND_HEAD_DIMS if dim >= head_dim), None)
        if padded is None:
            raise ValueError(f"vision heads of {head_dim} dimensions: an NPU supports up to {_TND_HEAD_DIMS[-1]}")
        query, key, value = (F.pad(states, (0, padded - head_dim)) for states in (query, key, value))
        ends = list(cu_seqlens_host[1:])
        attended = self._attention(
            query,
            key.contiguous(),
            value.contiguous(),
            layout="TND",
            num_kv_heads=key.shape[1],
            query_lens=ends,
            context_lens=ends,
            scale=scale,
        )
        return attended[..., :head_dim].contiguous()

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layout: Layout,
        num_kv_heads: int,
        query_lens: list[int],
        context_lens: list[int],
        scale: float,
        **pages: Any,
    ) -> Tensor:
        """``pages``: block_table, block_size and atten_mask."""
        output: Tensor = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query.contiguous(),
            key,
            value,
            input_layout=layout,
            num_query_heads=query.shape[-2],
            num_key_value_heads=num_kv_heads,
            softmax_scale=scale,
            actual_seq_qlen=query_lens,
            actual_seq_kvlen=context_lens,
            sparse_mode=_UNMASKED if pages.get("atten_mask") is None else _CAUSAL,
            **pages,
        )[0]
        return output

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        output: Tensor = torch.ops.npu.npu_rms_norm(hidden, weight, epsilon)[0]
        return output

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(hidden, residual, weight, epsilon)
        return normed, total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel takes BSND with a batch of one; tables are 1S1D.
        cos, sin = (table.to(query.dtype)[None, :, None] for table in (cos, sin))
        rotated_query, rotated_key = (
            torch.ops.npu.npu_rotary_mul(states[None].contiguous(), cos, sin)[0] for states in (query, key)
        )
        return rotated_query, rotated_key

    def swiglu(self, gate_up: Tensor) -> Tensor:
        output: Tensor = torch.ops.npu.npu_swiglu(gate_up)
        return output


def _call(
    layout: Layout,
    start: int,
    query_lens: list[int],
    context_lens: list[int],
    table: Tensor,
    *,
    mask: Tensor | None,
) -> _Call:
    return _Call(
        tokens=slice(start, start + sum(query_lens)),
        batch=len(query_lens),
        query_lens=list(accumulate(query_lens)) if layout == "TND" else query_lens,
        context_lens=context_lens,
        block_table=table.contiguous(),
        mask=mask,
    )


def _check_block_size(block_size: int, *, has_chunks: bool) -> None:
    """Raise ValueError for an unsupported block size; chunks are more restricted than decodes."""
    multiple = 128 if has_chunks else 16
    if block_size % multiple or not 0 < block_size <= _MAX_BLOCK_SIZE:
        raise ValueError(
            f"KV blocks of {block_size} tokens: an NPU's {'prefill' if has_chunks else 'decode'} needs a multiple "
            f"of {multiple} up to {_MAX_BLOCK_SIZE}; 128 suits both"
        )
