"""Gemma 4 12B: patches and waves go into the language model without a tower, by a projection each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from epd_serve.models.audio_processor import AudioProcessor, WaveAudio
from epd_serve.models.families.gemma4 import Gemma4
from epd_serve.models.family import Pixels, TowerInputs, names


class Gemma4Unified(Gemma4):
    """Gemma 4's pictures and videos, and sounds of any length, whose rows are 40 milliseconds each."""

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
    merged = True

    @staticmethod
    def read_pictures(path: Path) -> Any:
        from epd_serve.models.picture_processor import PictureProcessor

        numbers = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}
        unused = {"size": None, "image_mean": None, "image_std": None}  # as pictures are not normalised
        return PictureProcessor.read(path, resample=3, do_normalize=False, **numbers, **unused)

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        return WaveAudio(extractor, padded_positions=False, kind="Gemma4UnifiedAudioFeatureExtractor")

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        """Patches as large as a token [1, tokens, values], and the column and row of each."""
        import torch

        from epd_serve.models.video_processor import resized

        height, width = self.fitted((pixels.shape[1], pixels.shape[0]))
        side = self._kernel * self.processor.patch_size
        rows, columns = height // side, width // side
        picture = resized(torch.from_numpy(pixels).permute(2, 0, 1)[None], (height, width))
        patches = picture.view(3, rows, side, columns, side).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return {"pixel_values": patches * self.processor.rescale_factor, "image_position_ids": places[None]}

    def check_tower(self, num_tokens: int) -> None:
        if num_tokens > (places := self.config.vision_config.mm_posemb_size):
            raise ValueError(f"vision_config.mm_posemb_size is {places}; it must be {num_tokens} or more")
