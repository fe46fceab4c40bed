"""Qwen2-Audio, Qwen3-ASR: audio is one run of tokens, with plain rotary positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from epd_serve.models.audio_processor import PaddedAudio, SpeechAudio
from epd_serve.models.family import AUDIO_TOWER, Family, SoundFamily, TowerInputs, names


class Qwen2Audio(SoundFamily):
    """Whisper's tower, pooled to half its positions; plain rotary positions."""

    title = "Qwen2-Audio"
    model_types = ("qwen2_audio",)
    fields = names("audio_token_index tie_word_embeddings")
    towers: ClassVar = {"qwen2_audio_encoder": AUDIO_TOWER}
    audio_processor = PaddedAudio

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


#: Fields of Qwen3's audio towers honoured by encoders.
QWEN3_TOWER = names(
    "num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim d_model activation_function",
    "scale_embedding n_window n_window_infer output_dim downsample_hidden_size max_position_embeddings",
)


class Qwen3Asr(SoundFamily):
    """One-second blocks of 13 rows each, with attention within 8 seconds; plain rotary positions."""

    title = "Qwen3-ASR"
    model_types = ("qwen3_asr",)
    fields = names("audio_token_id timestamp_token_id tie_word_embeddings")
    towers: ClassVar = {"qwen3_asr_encoder": QWEN3_TOWER}
    audio_processor = SpeechAudio

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        output = Family.features(model, inputs)
        mask = inputs["input_features_mask"]
        lengths = mask.view(len(mask), -1, 2 * model.config.audio_config.n_window).sum(-1)
        counts = model.model.audio_tower._post_cnn_length(lengths).sum(-1)
        output.pooler_output = output.pooler_output.split(counts.tolist())
        return output
