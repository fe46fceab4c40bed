"""GLM-4.1V, GLM-4.5V, GLM-4.6V: images of any resolution, M-RoPE over a part of each head, without videos."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from epd_serve.models.families.qwen_vl import QwenVL
from epd_serve.models.family import TEXT, names

_TEXT = TEXT | names("hidden_act rms_norm_eps")
_EXPERTS = names(
    "head_dim attention_bias moe_intermediate_size num_experts_per_tok n_shared_experts n_routed_experts n_group",
    "topk_group routed_scaling_factor first_k_dense_replace norm_topk_prob",
)
_TOWER = names(
    "depth hidden_size hidden_act num_heads in_channels image_size patch_size spatial_merge_size",
    "temporal_patch_size rope_parameters intermediate_size out_hidden_size attention_bias rms_norm_eps",
)


class Glm4v(QwenVL):
    """Images of any resolution, resized to whole patches."""

    title = "GLM-4.1V"
    model_types = ("glm4v",)
    decoder = "generic"
    texts: ClassVar = {"glm4v_text": _TEXT}
    fields = names(
        "image_token_id image_start_token_id image_end_token_id video_token_id video_start_token_id",
        "video_end_token_id tie_word_embeddings",
    )
    towers: ClassVar = {"glm4v_vision": _TOWER}
    modalities = ("image",)
    takes_size_tensors = False  # position embeddings are resampled per image size
    bounds = None

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        frames = image_processor.temporal_patch_size  # an image is repeated this often
        self._resize = partial(self._resize, frames, temporal_factor=frames)


class Glm4vMoe(Glm4v):
    """Glm4v with a mixture-of-experts language model."""

    title = "GLM-4.5V"
    model_types = ("glm4v_moe",)
    texts: ClassVar = {"glm4v_moe_text": _TEXT | _EXPERTS}
    towers: ClassVar = {"glm4v_moe_vision": _TOWER}


class Glm46V(Glm4v):
    """Glm4v with a dense or a mixture-of-experts language model."""

    title = "GLM-4.6V"
    model_types = ("glm46v",)
    texts: ClassVar = Glm4v.texts | Glm4vMoe.texts
    towers: ClassVar = Glm4v.towers | Glm4vMoe.towers
