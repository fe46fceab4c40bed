"""The prefill and decode stages' model: tokens and features in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epd_serve.models.attention import AttentionContext
from epd_serve.models.loader import ModelPart, load_part, num_parameters


class LanguageModel:
    """Language model and head of a transformers vision-language model.

    Attributes:
        num_layers, num_kv_heads, head_dim: the shape of one token's KV.
        max_model_len: longest context that the rotary embedding was made for.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        model: Any = load_part(path, ModelPart.LANGUAGE_MODEL, dtype, device)
        text = model.config.get_text_config()
        self.inner = model.model
        self._language_model = model.model.language_model
        self._head = model.lm_head
        self._device = device
        self.dtype = dtype
        self.hidden_size: int = text.hidden_size
        self.num_layers: int = text.num_hidden_layers
        self.num_kv_heads: int = text.num_key_value_heads
        self.head_dim: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.max_model_len: int = text.max_position_embeddings
        self.num_parameters = num_parameters(model)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        context: AttentionContext,
        rows: Sequence[int],
        features: Tensor | None = None,
        feature_mask: Tensor | None = None,
    ) -> Tensor:
        """One step over a packed batch.

        Args:
            ids: [T]. positions: [axes, T].
            rows: tokens whose logits are wanted.
            features: [tokens under the mask, (1 + deepstack levels) * hidden], in batch order.
            feature_mask: [T] bool, the placeholder tokens that these features replace.

        Returns:
            float32 logits [len(rows), vocab].
        """
        embeddings = self._language_model.embed_tokens(ids.unsqueeze(0))
        extra: dict[str, Any] = {}
        if features is not None and feature_mask is not None:
            mask = feature_mask.unsqueeze(0)
            levels = torch.split(features.to(embeddings.dtype), self.hidden_size, dim=-1)
            embeddings[mask] = levels[0]
            if len(levels) > 1:
                extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels[1:])}
        hidden = self._language_model(
            inputs_embeds=embeddings,
            position_ids=positions.unsqueeze(1) if len(positions) > 1 else positions,
            use_cache=False,
            **context.as_arguments(),
            **extra,
        ).last_hidden_state[0]
        if len(rows) < len(ids):
            hidden = hidden[torch.tensor(rows, dtype=torch.long, device=self._device)]
        logits: Tensor = self._head(hidden)
        return logits.float()
