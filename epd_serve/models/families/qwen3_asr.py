"""Qwen3-ASR: a sound of any length is one run, which a language model of Qwen3 writes down."""

from __future__ import annotations

from typing import Any, ClassVar

from epd_serve.models.audio_processor import AudioProcessor, UnpaddedAudio
from epd_serve.models.family import Family, SoundFamily, TowerInputs, names

#: What encoders honour of Qwen3's towers that hear.
TOWER = names(
    "num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim d_model activation_function",
    "scale_embedding n_window n_window_infer output_dim downsample_hidden_size max_position_embeddings",
)


class Qwen3Asr(SoundFamily):
    """Blocks of a second, which see each other within 8 seconds, become 13 rows each; plain rotary positions."""

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
