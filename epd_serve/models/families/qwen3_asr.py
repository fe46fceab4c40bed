"""Qwen3-ASR: audio of any length is one run of tokens, transcribed by a Qwen3 language model."""

from __future__ import annotations

from typing import Any, ClassVar

from epd_serve.models.audio_processor import AudioProcessor, UnpaddedAudio
from epd_serve.models.family import Family, SoundFamily, TowerInputs, names

#: Fields of Qwen3's audio towers honoured by encoders.
TOWER = names(
    "num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim d_model activation_function",
    "scale_embedding n_window n_window_infer output_dim downsample_hidden_size max_position_embeddings",
)


class Qwen3Asr(SoundFamily):
    """One-second blocks of 13 rows each, with attention within 8 seconds; plain rotary positions."""

    title = "Qwen3-ASR"
    model_types = ("qwen3_asr",)
    fields = names("audio_token_id timestamp_token_id tie_word_embeddings")
    towers: ClassVar = {"qwen3_asr_encoder": TOWER}

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        kind, mask = "Qwen3ASRFeatureExtractor", "input_features_mask"
        return UnpaddedAudio(extractor, padded_positions=False, kind=kind, mask=mask)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        output = Family.features(model, inputs)
        mask = inputs["input_features_mask"]
        lengths = mask.view(len(mask), -1, 2 * model.config.audio_config.n_window).sum(-1)
        counts = model.model.audio_tower._post_cnn_length(lengths).sum(-1)
        output.pooler_output = output.pooler_output.split(counts.tolist())
        return output
