"""Model of the prefill and decode stages: tokens and features in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from device.base import Device
from device.ops.linear import linear
from epd_serve.models.decoder import Decoder, StepContext
from epd_serve.models.families import family_of
from epd_serve.models.generic_decoder import GenericDecoder
from epd_serve.models.loader import ModelPart, load_part, num_parameters


class MoreLogits(Protocol):
    """Consumer of the logits of further tokens, piece by piece."""

    def pieces(self) -> Iterable[Tensor]:
        """Return pieces of rows [n] int64 on the device."""

    def take(self, logits: Tensor) -> None:
        """Take the logits [n, vocab] of the next piece."""


class LanguageModel:
    """Embedding, decoder and head of a transformers model.

    Attributes:
        num_layers, num_kv_heads, head_dim: the shape of one token's KV in the cache.
        state_blocks: function from block size to blocks of a sequence's recurrent state; 0 without such states.
        capturable: True if a step may be captured as a graph.
        num_query_heads: query heads per layer; 0 if layers differ.
        layers: function that computes the layers: :meth:`epd_serve.models.decoder.Decoder.forward`.
        hidden_size: width of a token's hidden state.
        feature_width: (1 + deepstack levels) * hidden, the width of a feature.
        max_model_len: longest context supported by the rotary embedding and the attention window.
        num_parameters: parameters of the language model and its head.
        inner: the transformers model without weights, for its position arithmetic; None for text alone.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: Device) -> None:
        """Load the model. Raises ValueError if the engine cannot run it."""
        model: Any = load_part(path, ModelPart.LANGUAGE_MODEL, dtype, device.torch_device)
        text = model.config.get_text_config()
        self.dtype = dtype
        self.num_parameters = num_parameters(model)
        family = family_of(model.config)
        is_fused = family.decoder == "fused"
        self.max_model_len = _max_model_len(text) if is_fused else text.max_position_embeddings
        self.hidden_size: int = text.hidden_size
        vision = getattr(model.config, "vision_config", None)
        num_levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self.feature_width = (1 + num_levels) * self.hidden_size
        inner = model.model
        language_model = getattr(inner, "language_model", inner)
        self._embed: nn.Module = language_model.embed_tokens  # some scale their output
        self._head = linear(model.get_output_embeddings().weight)
        as_padding = [getattr(model.config, name) for name in family.as_padding]
        self._as_padding = torch.tensor(as_padding, device=device.torch_device) if as_padding else None
        self._padding: int = text.pad_token_id if as_padding else 0
        is_capped = "final_logit_softcapping" in family.texts.get(text.model_type, ())
        self._logit_cap: float | None = text.final_logit_softcapping if is_capped else None
        self._decoder = (
            Decoder(language_model, device.ops)
            if is_fused
            else GenericDecoder(language_model, device.ops, both_ways_in_windows=family.both_ways_in_windows)
        )
        if device.type in ("cuda", "npu"):  # torch keeps the memory of weights that were fused
            torch.get_device_module(device.type).empty_cache()
        self.num_layers = self._decoder.num_layers
        self.num_kv_heads = self._decoder.num_kv_heads
        self.head_dim = self._decoder.head_dim
        self.capturable = self._decoder.capturable
        self.num_query_heads = self._decoder.num_query_heads
        self.layers = self._decoder.forward
        self.state_blocks = self._decoder.state_blocks
        self.inner = None
        if language_model is not inner:
            self.inner = inner
            inner.language_model = None

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: StepContext,
        rows: Tensor | None = None,
        features: Tensor | None = None,
        feature_rows: Tensor | None = None,
        more: MoreLogits | None = None,
        layers: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Return the logits [len(rows), vocab] of a packed batch. Never reads from the device.

        Args:
            ids: [T] int64. positions: [axes, T].
            rows: tokens to compute logits for, int64; None: all.
            features: [F, (1 + deepstack levels) * hidden], in batch order.
            feature_rows: [F] int64, the placeholder tokens that these features replace.
            more: consumer of logits of further rows, too many to keep at once.
            layers: replacement for :attr:`layers`, with the same arguments.
        """
        if self._as_padding is not None:
            ids = ids.masked_fill(torch.isin(ids, self._as_padding), self._padding)
        embeddings: Tensor = self._embed(ids)
        deepstack: list[Tensor] = []
        if features is not None and feature_rows is not None:
            first, *deepstack = torch.split(features.to(embeddings.dtype), self.hidden_size, dim=-1)
            embeddings = embeddings.index_copy(0, feature_rows, first)
        run = layers or self.layers
        hidden = run(ids, embeddings, positions, context, feature_rows, deepstack)
        if more is not None:
            for piece in more.pieces():
                more.take(self._logits(hidden.index_select(0, piece)))
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        if self._logit_cap is not None:
            logits = torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits


def _max_model_len(text: Any) -> int:
    """Return the rotary embedding's limit, or a smaller attention window, within which attention is full."""
    longest: int = text.max_position_embeddings
    layer_types = getattr(text, "layer_types", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    window: int | None = getattr(text, "sliding_window", None)
    return min(longest, window) if slides and window else longest
