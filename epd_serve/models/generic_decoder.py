"""transformers' language model layers over the paged cache, for models that the fused decoder does not support.

An attention function in transformers' registry writes K and V into pages and lets each sequence of a step attend
to its own. It builds the masks itself, because transformers supports neither pages nor packed sequences.
Sliding-window layers keep all K and V in pages and mask tokens outside the window. Layers without K and V have
states (:mod:`~epd_serve.models.recurrent_states`), or read K and V of an earlier layer. A layer with wider K and
V occupies several planes of the cache; a plane is as wide as the common divisor of all widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakMethod, finalize

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from device.base import AttentionOps
from device.ops.linear import pack_modules
from epd_serve.models.checkpoint_config import layer_configs
from epd_serve.models.decoder import StepContext
from epd_serve.models.loader import attend_by
from epd_serve.models.recurrent_states import RecurrentStates


@dataclass(frozen=True, slots=True)
class _Planes:
    """Location of a layer's K and V in the cache: consecutive planes, and the shape of the heads.

    ``is_written``: False for a layer that reads another layer's K and V.
    """

    first: int
    count: int
    heads: int
    head_dim: int
    is_written: bool = True

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class GenericDecoder:
    """Runs a transformers language model, with the interface of :class:`~epd_serve.models.decoder.Decoder`.

    Attributes:
        num_kv_heads, head_dim: shape of a plane of the cache: a layer's KV heads if all layers are alike.
        num_layers: planes of the cache: layers with K and V if these are alike.
        capturable: False, because masks are built on the host. num_query_heads: 0, because layers may differ.
    """

    capturable, num_query_heads = False, 0

    def __init__(self, model: Any, ops: AttentionOps, *, both_ways_in_windows: bool) -> None:
        """Convert a transformers language model.

        ``both_ways_in_windows``: attention is bidirectional only in sliding-window layers, within the window.
        """
        config = model.config
        self._ops = ops
        self._model = model
        pack_modules(model)
        self._both_ways_in_windows = both_ways_in_windows
        self._states = RecurrentStates(model, model.dtype)
        self._planes, (self.num_kv_heads, self.head_dim) = _planes(config, self._states.layers)
        self.num_layers = 1 + max(planes.last for planes in self._planes.values())
        # Gemma 4's per-layer token embeddings
        self._embeds_by_layer = bool(getattr(config, "hidden_size_per_layer_input", 0))
        self._step: _Step
        name = f"epd_paged_{id(self):x}"  # transformers passes None as mask to unknown implementations
        attend = WeakMethod(self._attend)  # the registry must not keep the weights of a past role

        def call(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
            method = attend()
            assert method is not None, "the decoder runs its model"
            return method(*arguments, **named)

        ALL_ATTENTION_FUNCTIONS[name] = call
        finalize(self, ALL_ATTENTION_FUNCTIONS.pop, name).atexit = False
        attend_by(model, name)

    def state_blocks(self, block_size: int) -> int:
        """Return the blocks for one sequence's recurrent state; 0 without such states."""
        return self._states.num_blocks(self.num_kv_heads * self.head_dim, block_size)

    def forward(
        self,
        ids: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        context: StepContext,
        feature_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return hidden states [T, hidden] after the final norm.

        ``ids``: [T]. ``embeddings``: [T, hidden]. ``positions``: [axes, T].
        """
        assert not deepstack, "no model of this decoder adds features to its layers"
        self._step = _Step(context, self._both_ways_in_windows)
        if self._states.layers:
            self._states.begin(context)
        positions = positions if len(positions) == 1 else positions[:, None]
        more: dict[str, Any] = {}
        if self._embeds_by_layer:
            more["per_layer_inputs"] = self._model.get_per_layer_inputs(ids[None])
        output = self._model(inputs_embeds=embeddings[None], position_ids=positions, use_cache=False, **more)
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
        """Compute attention in transformers' convention: [1, heads, T, head_dim] → [1, T, heads, head_dim]."""
        step, context, planes = self._step, self._step.context, self._planes[module.layer_idx]
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        kv_layer = context.kv[planes.first : planes.last + 1]
        if planes.is_written:
            self._write(key, value, kv_layer, planes)
        scale = query.shape[2] ** -0.5 if scaling is None else scaling
        if step.is_plain(sliding_window) and planes.count == 1 and planes.head_dim <= _MAX_HEAD_DIM:
            pages = kv_layer[0].view(*kv_layer.shape[1:4], planes.heads, planes.head_dim)
            return self._ops.attend(query, key, value, pages, context.plan, scale)[None], None
        output = query.new_empty(query.shape)
        for run in step.runs(sliding_window):
            num_seen = run.mask.shape[1]
            keys, values = (_gather(pages, run.blocks, planes)[:num_seen] for pages in kv_layer.unbind(1))
            own, keys, values = (one.transpose(0, 1)[None] for one in (query[run.rows], keys, values))
            is_grouped = own.shape[1] != keys.shape[1]
            attended = F.scaled_dot_product_attention(
                own, keys, values, attn_mask=run.mask, scale=scale, enable_gqa=is_grouped
            )
            output[run.rows] = attended[0].transpose(0, 1)
        return output[None], None

    def _write(self, key: Tensor, value: Tensor, kv_layer: Tensor, planes: _Planes) -> None:
        """Write a layer's K and V [T, heads, head_dim] into its planes of the cache."""
        context, shape = self._step.context, (planes.count, self.num_kv_heads, self.head_dim)
        keys, values = (states.reshape(len(states), *shape) for states in (key, value))
        for number, plane in enumerate(kv_layer):
            parts = keys[:, number].contiguous(), values[:, number].contiguous()
            self._ops.write_kv(*parts, plane, context.plan.meta.slot_mapping)
            index = planes.first + number
            # states are sent with the last plane, so report it once all states are written
            if context.on_layer is not None and not (self._states.layers and index == self.num_layers - 1):
                context.on_layer(index)


#: Widest heads of the device's own attention on GPUs.
_MAX_HEAD_DIM = 256


def _planes(config: Any, without: Sequence[int]) -> tuple[dict[int, _Planes], tuple[int, int]]:
    """Return the planes of each layer except ``without``, and the heads and width of a plane."""
    own = layer_configs(config)
    shapes = [
        (one.num_key_value_heads, getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads)
        for one in own
    ]
    modes = getattr(config, "kv_sharing_modes", None) or []  # layers that read K and V of an earlier layer
    stores = {config.layer_types[index]: index for index, mode in enumerate(modes) if mode == "store"}
    sources = {index: stores[config.layer_types[index]] for index, mode in enumerate(modes) if mode == "reuse"}
    kept = [index for index in range(config.num_hidden_layers) if index not in without]
    width = math.gcd(*(math.prod(shapes[index]) for index in kept))
    planes: dict[int, _Planes] = {}
    first = 0
    for index in kept:
        if index in sources:
            planes[index] = replace(planes[sources[index]], is_written=False)
            continue
        planes[index] = _Planes(first, math.prod(shapes[index]) // width, *shapes[index])
        first += planes[index].count
    plain = next((shapes[index] for index in kept if math.prod(shapes[index]) == width), (1, width))
    return planes, plain


def _gather(pages: Tensor, blocks: Tensor, planes: _Planes) -> Tensor:
    """Gather K or V [tokens, heads, head_dim] of blocks from [planes, num_blocks, block_size, heads, width]."""
    tokens = pages.index_select(1, blocks).flatten(1, 2).flatten(2).transpose(0, 1)
    return tokens.reshape(len(tokens), planes.heads, planes.head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The tokens of one sequence in a step, the blocks that they may see, and a mask [rows, columns].

    The columns end at the sequence's last token: later entries of a block may be garbage, even NaN.
    """

    rows: slice
    blocks: Tensor
    mask: Tensor


class _Step:
    """One step's sequences, and the masks of its layers by their sliding window; None: a layer without one.

    ``both_ways_in_windows``: attention is bidirectional only in layers with a window, and only within it.
    """

    def __init__(self, context: StepContext, both_ways_in_windows: bool) -> None:
        self.context = context
        self._both_ways_in_windows = both_ways_in_windows
        self._runs: dict[int | None, list[_Run]] = {}
        meta = context.plan.meta
        self._longest = max((*meta.decode_context_lens_host, *meta.prefill_context_lens), default=0)

    def is_plain(self, window: int | None) -> bool:
        """Return whether attention is plainly causal, so that the device's operator can be used."""
        return (window is None or self._longest <= window) and not any(self._both_ways(window))

    def runs(self, window: int | None) -> list[_Run]:
        """Return the sequences with their masks, cached for all layers with this window."""
        if window not in self._runs:
            meta, runs, row = self.context.plan.meta, [], 0
            for length, blocks in zip(meta.decode_context_lens_host, meta.decode_block_table, strict=True):
                runs.append(self._run(row, 1, length, blocks, window, ()))
                row += 1
            chunks = zip(meta.prefill_query_lens, meta.prefill_context_lens, strict=True)
            both_ways = self._both_ways(window) or [()] * len(meta.prefill_query_lens)
            for (count, length), blocks, spans in zip(chunks, meta.prefill_block_table, both_ways, strict=True):
                runs.append(self._run(row, count, length, blocks, window, spans))
                row += count
            self._runs[window] = runs
        return self._runs[window]

    def _both_ways(self, window: int | None) -> Sequence[Sequence[tuple[int, int]]]:
        return () if window is None and self._both_ways_in_windows else self.context.both_ways

    def _run(
        self,
        row: int,
        count: int,
        length: int,
        blocks: Tensor,
        window: int | None,
        spans: Sequence[tuple[int, int]],
    ) -> _Run:
        """Return the run of a sequence's last ``count`` of ``length`` tokens, at ``row`` of the batch."""
        size, start = self.context.plan.meta.block_size, length - count
        first = 0 if window is None else max(start - window + 1, 0)
        if not self._both_ways_in_windows:  # the first token of a run is visible however far back it is
            first = min([first, *(low for low, _ in spans)])
        first //= size
        blocks = blocks[first : -(-length // size)]
        own = torch.arange(start, length, device=blocks.device)[:, None]
        others = torch.arange(first * size, length, device=blocks.device)
        inside = own - others < (length if window is None else window)
        mask = (others <= own) & inside
        for low, high in spans:
            mask |= (own >= low) & (own < high) & (others >= low) & (others < high)
        if self._both_ways_in_windows:
            mask &= inside
        return _Run(rows=slice(row, row + count), blocks=blocks, mask=mask)
