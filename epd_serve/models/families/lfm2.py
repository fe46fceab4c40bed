"""LFM2: most layers are short convolutions, which keep their last inputs instead of K and V."""

from __future__ import annotations

from typing import ClassVar

from epd_serve.models.families.text_only import TextOnly
from epd_serve.models.family import TEXT, names


class Lfm2(TextOnly):
    """LFM2 without a tower."""

    title = "LFM2 (text)"
    model_types = ("lfm2",)
    decoder = "generic"
    texts: ClassVar = {
        "lfm2": TEXT
        | names(
            "head_dim norm_eps conv_bias conv_L_cache",
            "block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim full_attn_idxs layer_types",
        )
    }
