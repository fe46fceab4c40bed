"""transformers' own layers of a language model over our paged cache, where the fused decoder does not reach.

Attention goes through transformers' registry of attention functions: K and V are written into pages, then each
sequence of a step attends to its own. Masks are ours, as transformers knows neither pages nor packed sequences.
Layers of a sliding window keep all K and V in pages, and mask what lies outside their window. Layers without K and
V have states (:mod:`~epd_serve.models.recurrent_states`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from device.base import AttentionOps
from device.distributed import Group
from device.ops.linear import pack_modules
from epd_serve.models.decoder import StepContext
from epd_serve.models.loader import attend_by
from epd_serve.models.recurrent_states import RecurrentStates


class GenericDecoder:
    """Runs a language model of transformers. The same to its caller as :class:`~epd_serve.models.decoder.Decoder`.

    Attributes:
        kv_heads: all of the model's KV heads.
        num_layers: those with K and V.
        capturable: False; masks are made on the host.
    """

    capturable = False

    def __init__(self, model: Any, ops: AttentionOps, device: torch.device, group: Group | None = None) -> None:
        """Take over a transformers language model. Raises ValueError for a group of several devices."""
        config = model.config
        if group is not None and group.size > 1:
            raise ValueError(f"the layers of {config.model_type!r} are not split over devices; use one")
        self._ops = ops
        self._model: Any = model.to(device)
        pack_modules(model)
        self._states = RecurrentStates(model, model.dtype)
        others = [index for index in range(config.num_hidden_layers) if index not in self._states.layers]
        self._kv_layers = {index: number for number, index in enumerate(others)}
        self.num_layers = len(others)
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_heads = range(config.num_key_value_heads)
        self._step: _Step
        name = f"epd_paged_{id(self):x}"  # masks of an implementation that transformers does not know are None
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        attend_by(model, name)

    def state_blocks(self, block_size: int) -> int:
        """Blocks for the recurrent state of one sequence; 0: there is none."""
        return self._states.num_blocks(len(self.kv_heads) * self.head_dim, block_size)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: StepContext,
        feature_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Hidden states [T, hidden] after the final norm of embeddings [T, hidden] at positions [axes, T]."""
        assert not deepstack, "no model of this decoder adds features to its layers"
        self._step = _Step(context)
        if self._states.layers:
            self._states.begin(context)
        positions = positions if len(positions) == 1 else positions[:, None]
        output = self._model(inputs_embeds=embeddings[None], position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        if self._states.layers and context.on_layer is not None:
            context.on_layer(self.num_layers - 1)
        return hidden

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attention in transformers' convention: [1, heads, T, head_dim] each → [1, T, heads, head_dim]."""
        step, context, index = self._step, self._step.context, self._kv_layers[module.layer_idx]
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        kv_layer = context.kv[index]
        self._ops.write_kv(key, value, kv_layer, context.plan.meta.slot_mapping)
        if context.on_layer is not None and not (self._states.layers and index == self.num_layers - 1):
            context.on_layer(index)  # the last one is told when all states are written, which go with it
        scale = self.head_dim**-0.5 if scaling is None else scaling
        if step.is_plain(sliding_window):
            return self._ops.attend(query, key, value, kv_layer, context.plan, scale)[None], None
        output = query.new_empty(query.shape)
        for run in step.runs(sliding_window):
            keys, values = (pages.index_select(0, run.blocks).flatten(0, 1) for pages in kv_layer)
            attended = F.scaled_dot_product_attention(
                query[run.rows].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=run.mask,
                scale=scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
            output[run.rows] = attended[0].transpose(0, 1)
        return output[None], None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The tokens of one sequence in a step.

    Attributes:
        rows: in the batch. blocks: those of what they may see.
        mask: [rows, blocks * block_size], the tokens in these blocks that each of them sees.
    """

    rows: slice
    blocks: Tensor
    mask: Tensor


class _Step:
    """One step's sequences, and the masks of its layers."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self._runs: dict[int | None, list[_Run]] = {}
        meta = context.plan.meta
        self._longest = max((*meta.decode_context_lens_host, *meta.prefill_context_lens), default=0)

    def is_plain(self, window: int | None) -> bool:
        """Whether each token sees all before it and nothing else, as the device's own attention has it."""
        return not any(self.context.both_ways) and (window is None or self._longest <= window)

    def runs(self, window: int | None) -> list[_Run]:
        """The sequences with their masks, made once for all layers of a window; None: of no window."""
        if window not in self._runs:
            meta, runs, row = self.context.plan.meta, [], 0
            for length, blocks in zip(meta.decode_context_lens_host, meta.decode_block_table, strict=True):
                runs.append(self._run(row, 1, length, blocks, window, ()))
                row += 1
            chunks = zip(meta.prefill_query_lens, meta.prefill_context_lens, strict=True)
            both_ways = self.context.both_ways or [()] * len(meta.prefill_query_lens)
            for (count, length), blocks, spans in zip(chunks, meta.prefill_block_table, both_ways, strict=True):
                runs.append(self._run(row, count, length, blocks, window, spans))
                row += count
            self._runs[window] = runs
        return self._runs[window]

    def _run(
        self,
        row: int,
        count: int,
        length: int,
        blocks: Tensor,
        window: int | None,
        spans: Sequence[tuple[int, int]],
    ) -> _Run:
        """The last ``count`` tokens of a sequence of ``length``, from ``row`` of the batch on."""
        size, start = self.context.plan.meta.block_size, length - count
        first = 0 if window is None else max(start - window + 1, 0) // size
        blocks = blocks[first : -(-length // size)]
        own = torch.arange(start, length, device=blocks.device)[:, None]
        others = torch.arange(first * size, (first + len(blocks)) * size, device=blocks.device)
        mask = others <= own
        for low, high in spans:
            mask |= (own >= low) & (own < high) & (others >= low) & (others < high)
        if window is not None:
            mask &= own - others < window
        return _Run(rows=slice(row, row + count), blocks=blocks, mask=mask)
