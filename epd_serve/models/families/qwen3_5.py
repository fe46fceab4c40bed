"""Qwen3.5, Qwen3.6: images and videos of any resolution; most layers keep a state instead of K and V."""

from __future__ import annotations

from typing import ClassVar

from epd_serve.models.families.qwen_vl import Qwen3VL, QwenVL
from epd_serve.models.families.text_only import TextOnly
from epd_serve.models.family import TEXT, names

_TEXT = TEXT | names(
    "head_dim hidden_act rms_norm_eps attention_bias",
    "layer_types linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads",
    "linear_num_value_heads",
)
_EXPERTS = names("num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size")
_TOWER = names(
    "depth hidden_size hidden_act num_heads in_channels patch_size spatial_merge_size temporal_patch_size",
    "rope_parameters intermediate_size out_hidden_size num_position_embeddings",
)


class Qwen35Text(TextOnly):
    """Qwen3.5 without a tower."""

    title = "Qwen3.5, Qwen3.6 (text)"
    model_types = ("qwen3_5_text", "qwen3_5_moe_text")
    decoder = "generic"
    texts: ClassVar = {"qwen3_5_text": _TEXT, "qwen3_5_moe_text": _TEXT | _EXPERTS}


class Qwen35(Qwen3VL):
    """Each temporal patch of a video follows its timestamp."""

    title = "Qwen3.5, Qwen3.6"
    model_types = ("qwen3_5", "qwen3_5_moe")
    decoder = "generic"
    texts = Qwen35Text.texts
    fields = QwenVL.fields
    towers: ClassVar = {"qwen3_5_vision": _TOWER, "qwen3_5_moe_vision": _TOWER}
