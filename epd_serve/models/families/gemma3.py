"""Gemma 3: images of one size with bidirectional attention; most layers use a sliding window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.models.families.text_only import TextOnly
from epd_serve.models.family import PATCH_TOWER, TEXT, Family, Size, names

_TEXT = TEXT | names(
    "head_dim hidden_activation rms_norm_eps attention_bias query_pre_attn_scalar sliding_window layer_types"
)


class Gemma3Text(TextOnly):
    """Gemma 3 without a tower."""

    title = "Gemma 3 (text)"
    model_types = ("gemma3_text",)
    decoder = "generic"
    texts: ClassVar = {"gemma3_text": _TEXT}


class Gemma3(Family):
    """One size for every image, with bidirectional attention among its tokens."""

    title = "Gemma 3"
    model_types = ("gemma3",)
    decoder = "generic"
    texts: ClassVar = {"gemma3_text": _TEXT}
    fields = names("image_token_index boi_token_index eoi_token_index mm_tokens_per_image tie_word_embeddings")
    towers: ClassVar = {"siglip_vision_model": PATCH_TOWER | {"vision_use_head"}}
    tokens = ("<start_of_image>", "<end_of_image>")

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self.token_ids = {"image": config.boi_token_index}
        self.both_ways_tokens = config.mm_tokens_per_image
        self.processor_fields = {"image_seq_length": self.both_ways_tokens}

    def parts(self, size: Size) -> Sequence[int | str]:
        start, end = self.tokens
        return (f"\n\n{start}", self.both_ways_tokens, f"{end}\n\n")

    def num_pixels(self, size: Size) -> int:
        return int(self.config.vision_config.image_size) ** 2

    def check_pictures(self) -> None:
        if self.processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan of preprocessor_config.json is true; images are only used whole")
        vision = self.config.vision_config
        rows, side = vision.image_size // vision.patch_size, math.isqrt(self.both_ways_tokens)
        if side**2 != self.both_ways_tokens or rows % side:
            raise ValueError(
                f"mm_tokens_per_image is {self.both_ways_tokens}; it must be the square of a divisor of {rows}, "
                "the patches on a side by image_size and patch_size of vision_config"
            )
        super().check_pictures()
