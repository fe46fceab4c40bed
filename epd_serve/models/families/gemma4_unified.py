"""Gemma 4 12B: projections feed patches and waveforms to the language model without a tower."""

from __future__ import annotations

from typing import Any, ClassVar

from epd_serve.models.audio_processor import AudioProcessor, WaveAudio
from epd_serve.models.families.gemma4 import Gemma4
from epd_serve.models.family import names


class Gemma4Unified(Gemma4):
    """Gemma 4's images and videos, and audio of any length with rows of 40 milliseconds."""

    title = "Gemma 4 12B"
    model_types = ("gemma4_unified",)
    texts: ClassVar = {"gemma4_unified_text": Gemma4.texts["gemma4_text"]}
    towers: ClassVar = {
        "gemma4_unified_vision": names(
            "patch_size pooling_kernel_size mm_embed_dim mm_posemb_size rms_norm_eps output_proj_dims"
        ),
        "gemma4_unified_audio": names("audio_embed_dim rms_norm_eps"),
    }
    both_ways_in_windows = False

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        return WaveAudio(extractor, padded_positions=False, kind="Gemma4UnifiedAudioFeatureExtractor")

    def check_tower(self, num_tokens: int) -> None:
        if num_tokens > (places := self.config.vision_config.mm_posemb_size):
            raise ValueError(f"vision_config.mm_posemb_size is {places}; it must be {num_tokens} or more")
