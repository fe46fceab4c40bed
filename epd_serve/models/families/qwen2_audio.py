"""Qwen2-Audio: audio of up to 30 seconds is one run of tokens; its tower always computes 30 seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from epd_serve.models.audio_processor import AudioProcessor
from epd_serve.models.family import AUDIO_TOWER, SoundFamily, TowerInputs, names


class Qwen2Audio(SoundFamily):
    """Whisper's tower, pooled to half its positions; plain rotary positions."""

    title = "Qwen2-Audio"
    model_types = ("qwen2_audio",)
    fields = names("audio_token_index tie_word_embeddings")
    towers: ClassVar = {"qwen2_audio_encoder": AUDIO_TOWER}

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        return AudioProcessor(extractor, padded_positions=True)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        """Call tower and projector, as transformers lacks a function for both; padding forms its own segment."""
        import torch

        spectra, mask = inputs["input_features"], inputs["feature_attention_mask"]
        num_positions, num_rows = model.model.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
        length = spectra.shape[-1] // 2
        starts = length * torch.arange(len(spectra), device=mask.device)
        borders = torch.unique(torch.stack((starts, starts + num_positions, starts + length)))
        is_sound = torch.arange(length, device=mask.device) < num_positions[:, None]
        hidden = model.model.audio_tower(
            spectra, attention_mask=is_sound[:, None, None], cu_seq_lens_q=borders.int()
        ).last_hidden_state
        rows = model.model.multi_modal_projector(hidden)
        features = [row[:count] for row, count in zip(rows, num_rows.tolist(), strict=True)]
        return SimpleNamespace(pooler_output=features)
