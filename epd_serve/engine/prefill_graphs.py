"""Device graphs for steps with prompts; attention runs eagerly between the pieces of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from device.base import AttentionPlan, AttnMeta, Device, GraphRunner
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel

#: Captured step sizes in tokens. In larger steps the device takes longer than the launches: on an H100's machine
#: eager decode steps of a 7B model took 18 to 28 ms, and a prefill of 1024 tokens 23.5 ms (docs/reports/gpu.md).
_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)


def prefill_graph_sizes(max_num_tokens: int) -> list[int]:
    """Return the captured sizes, in tokens, for steps of up to ``max_num_tokens``."""
    return [size for size, below in zip(_SIZES, (0, *_SIZES), strict=False) if below < max_num_tokens]


class _Between:
    """The eager part of a step: attention on the actual tokens, between the pieces of the graph.

    Attributes:
        queries, keys, values: [tokens, heads, head_dim] of a layer, from the previous piece.
        attended: same shape as queries, for the next piece; 0 for padding.
        context: context of the replayed step; None during capture. num_tokens: its tokens.
    """

    def __init__(self, model: LanguageModel, device: Device, kv: Tensor, most: int) -> None:
        self._ops, self._kv = device.ops, kv
        zeros = partial(torch.zeros, dtype=model.dtype, device=device.torch_device)
        self.queries, self.attended = zeros(2, most, model.num_query_heads, model.head_dim).unbind(0)
        self.keys, self.values = zeros(2, most, kv.shape[4], model.head_dim).unbind(0)
        self.context: StepContext | None = None
        self.num_tokens = 0

    def attend(self, layer: int, scale: float) -> None:
        if self.context is None:
            return
        if self.context.on_layer is not None:
            self.context.on_layer(layer)
        count = self.num_tokens
        query, key, value = (buffer[:count] for buffer in (self.queries, self.keys, self.values))
        attended = self._ops.attend(query, key, value, self._kv[layer], self.context.plan, scale)
        self.attended[:count].copy_(attended)


class PrefillGraphs:
    """Captures a model's layers for steps with prompts, mixed with decodes or not.

    A graph reads embeddings, positions and slots from static buffers. It is cut at each layer's attention, which
    runs eagerly on the actual tokens, so that lengths and tables stay out of the graph. Padding rows write into
    block 0, which is reserved for them.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        num_position_axes: rows of the rotary positions.
        sizes: tokens of the steps to capture, ascending; larger ones do not run here.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        graphs: GraphRunner,
        kv: Tensor,
        *,
        num_position_axes: int,
        sizes: Sequence[int],
    ) -> None:
        self._model, self._graphs, self._kv, self._sizes = model, graphs, kv, sizes
        most, width = sizes[-1], model.hidden_size
        zeros = partial(torch.zeros, dtype=model.dtype, device=device.torch_device)
        integers = partial(torch.zeros, dtype=torch.long, device=device.torch_device)
        self._embeddings = zeros(most, width)
        self._added = zeros(model.feature_width // width - 1, most, width)  # deepstack, in the first layers
        self._adds = False  # the last step added some
        self._between = _Between(model, device, kv, most)
        self._positions, self._slots = integers(num_position_axes, most), integers(most)
        self._no_table = torch.zeros(0, 1, dtype=torch.int32, device=device.torch_device)
        self._spare = torch.arange(most, device=device.torch_device) % kv.shape[3]
        with torch.inference_mode():
            for size in reversed(sizes):  # the largest first: the others reuse its memory pool
                graphs.capture(size, partial(self._layers, size))

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self._sizes[-1]

    def forward(
        self,
        ids: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        context: StepContext,
        feature_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """See :meth:`epd_serve.models.decoder.Decoder.forward`; the next call overwrites the result."""
        count = len(embeddings)
        size = next(size for size in self._sizes if size >= count)
        slots = context.plan.meta.slot_mapping
        self._embeddings[:count].copy_(embeddings)
        self._positions[:, :count].copy_(positions)
        self._slots[:count].copy_(slots)
        if size > count:
            self._slots[count:size].copy_(self._spare[: size - count])
            for padded in (self._embeddings, self._between.attended):  # block 0 must stay finite
                padded[count:size].zero_()
        if self._adds:
            self._added.zero_()
        self._adds = feature_rows is not None and len(deepstack) > 0
        if feature_rows is not None and deepstack:
            self._added.index_copy_(1, feature_rows, torch.stack(list(deepstack)))
        self._between.context, self._between.num_tokens = context, count
        try:
            return self._graphs.replay(size)[:count]
        finally:
            self._between.context = None

    def _layers(self, size: int) -> Tensor:
        """Run the captured layers."""
        meta = AttnMeta(
            block_size=self._kv.shape[3],
            slot_mapping=self._slots[:size],
            num_decodes=0,
            decode_block_table=self._no_table,
            decode_context_lens=self._slots[:0],
            decode_context_lens_host=[],
            prefill_query_lens=[],
            prefill_context_lens=[],
            prefill_block_table=self._no_table,
        )
        context = StepContext(plan=AttentionPlan(meta=meta), kv=self._kv, attend=self._attend)
        added = self._added[:, :size].unbind(0)
        return self._model.layers(
            self._slots[:size], self._embeddings[:size], self._positions[:, :size], context, None, added
        )

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        size, between = len(query), self._between
        for buffer, states in ((between.queries, query), (between.keys, key), (between.values, value)):
            buffer[:size].copy_(states)
        self._graphs.cut(partial(between.attend, layer, scale))
        return between.attended[:size]
