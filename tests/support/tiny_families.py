"""Tiny random checkpoints of families with media tokens of their own, with tokenizers that have these tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from epd_serve.demo import weights_dir

_INIT = {"initializer_range": 0.2}
_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, **_INIT}
_CLIP = {**_LAYERS, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 64}
_SIGLIP = {**_LAYERS, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
_PIXTRAL = {**_LAYERS, "model_type": "pixtral", "image_size": 140, "patch_size": 14}
_SQUARE = {"height": 56, "width": 56}
_GRID = [[56, 112], [112, 56], [112, 112]]

#: Layers inside a window that is shorter than prompts and pictures, and of other frequencies than those of full
#: attention.
GEMMA3: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": False,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
#: Most layers have a recurrent state, the last one among them.
QWEN3_5: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "full", "linear")],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One family's tiny model.

    Attributes:
        text, vision, top: fields of the parts of its configuration; the id of ``image`` is put in.
        image: the token that stands for a picture. tokens: others that its pictures have.
        rows: the token of the rows of its feature, where it is another. shown: what a chat shows of a picture,
            with tokens around that of the picture.
        video, audio: the tokens that stand for a video and a sound, where it takes them. videos: of its video
            processor's file.
        named: those that its processor asks the tokenizer for. processor: of processor_config.json.
    """

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    top: dict[str, Any]
    image: str
    image_field: str
    preprocessor: dict[str, Any]
    processor: dict[str, Any]
    rows: str = ""
    shown: str = ""
    video: str = ""
    audio: str = ""
    videos: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)


def _pixtral(name: str, merge: int, top: dict[str, Any]) -> Tiny:
    return Tiny(
        model_type=name,
        text={"model_type": "mistral", "sliding_window": None, "head_dim": 32},
        vision=_PIXTRAL,
        top=top,
        image="[IMG]",
        image_field="image_token_index",
        tokens=["[IMG_BREAK]", "[IMG_END]"],
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 140},
            "patch_size": {"height": 14, "width": 14},
        },
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": merge},
    )


def _glm4v(name: str, kind: str = "Glm4v", vision: str = "", **text: Any) -> Tiny:
    return Tiny(
        model_type=name,
        text={
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e4,
            },
            **text,
        },
        vision={
            **({"model_type": vision} if vision else {}),
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "out_hidden_size": 128,
            "intermediate_size": 128,
            "image_size": 112,
            **_INIT,
        },
        top={"image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"},
        image="<|image|>",
        shown="<|begin_of_image|><|image|><|end_of_image|>",
        image_field="image_token_id",
        tokens=["<|begin_of_image|>", "<|end_of_image|>"],
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        preprocessor={
            "image_processor_type": f"{kind}ImageProcessor",
            "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 140 * 140},
        },
        processor={"processor_class": f"{kind}Processor"},
    )


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> Tiny:
    """Pictures of many tokens: its processor knows no fewer."""
    around = {"boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    return Tiny(
        model_type="gemma4",
        text={
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 6,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 20.0,
            **text,
        },
        vision={**_LAYERS, "num_key_value_heads": 4, "head_dim": 16, "position_embedding_size": 256, **vision},
        top={
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
            "tie_word_embeddings": False,
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "output_proj_dims": 48,
                "subsampling_conv_channels": [32, 16],
                **_INIT,
            },
        },
        image="<|image|>",
        image_field="image_token_id",
        tokens=[*around.values(), "<|video|>", "<|audio|>"],
        video="<|video|>",
        audio="<|audio|>",
        videos={"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, "num_frames": 2},
        named={"image_token": "<|image|>", "audio_token": "<|audio|>", **around},
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "feature_size": 32,
            "max_soft_tokens": 70,
        },
        processor={"processor_class": "Gemma4Processor"},
    )


TINY = {
    # embeddings by layer; the last layers read K and V of others, which are of two widths
    "gemma4": _gemma4(
        {
            "global_head_dim": 64,
            "num_hidden_layers": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
        },
        {},
    ),
    # pictures that attend both ways, experts, and heads of two shapes and one width
    "gemma4_moe": _gemma4(
        {
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        {"use_clipped_linears": True, "standardize": True},
    ),
    "internvl": Tiny(
        model_type="internvl",
        text={"model_type": "qwen3", "head_dim": 32},
        vision={**_LAYERS, "image_size": [56, 56], "patch_size": [14, 14]},
        top={"image_seq_length": 4, "downsample_ratio": 0.5},
        image="<IMG_CONTEXT>",
        image_field="image_token_id",
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": _SQUARE,
            "min_patches": 1,
            "max_patches": 6,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "mistral3": _pixtral("mistral3", 2, {"spatial_merge_size": 2}),
    "pixtral": _pixtral("llava", 1, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "llava_next": Tiny(
        model_type="llava_next",
        text={"model_type": "llama"},
        vision=_CLIP,
        top={"image_grid_pinpoints": _GRID},
        image="<image>",
        image_field="image_token_index",
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": _SQUARE,
            "image_grid_pinpoints": _GRID,
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": Tiny(
        model_type="llava_onevision",
        text={"model_type": "qwen2"},
        vision={**_SIGLIP, "vision_use_head": False},
        top={"image_grid_pinpoints": [[56, 56], *_GRID], "vision_aspect_ratio": "anyres_max_2"},
        image="<image>",
        image_field="image_token_index",
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _SQUARE,
            "image_grid_pinpoints": [[56, 56], *_GRID],
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "gemma3": Tiny(
        model_type="gemma3",
        text={"model_type": "gemma3_text", **GEMMA3},
        vision={**_SIGLIP, "image_size": 84, "vision_use_head": False},
        top={
            "mm_tokens_per_image": 9,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "tie_word_embeddings": False,
        },
        image="<start_of_image>",
        rows="<image_soft_token>",
        image_field="image_token_index",
        tokens=["<end_of_image>"],
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        preprocessor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 84, "width": 84}},
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 9},
    ),
    "glm4v": _glm4v("glm4v"),
    "glm4v_moe": _glm4v(
        "glm4v_moe",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=2,
        routed_scaling_factor=1.5,
        head_dim=32,
    ),
    "glm46v": _glm4v(
        "glm46v",
        "Glm46V",
        "glm4v_moe_vision",
        model_type="glm4v_moe_text",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=2,
        head_dim=32,
    ),
}

_UNIFIED = TINY["gemma4"]
TINY["gemma4_unified"] = replace(
    _UNIFIED,
    model_type="gemma4_unified",
    text={
        **{name: value for name, value in _UNIFIED.text.items() if name != "hidden_size_per_layer_input"},
        "use_bidirectional_attention": "vision",
    },
    vision={"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 280, **_INIT},
    top={**_UNIFIED.top, "audio_config": {"audio_embed_dim": 640, **_INIT}},
    videos={**_UNIFIED.videos, "video_processor_type": "Gemma4UnifiedVideoProcessor"},
    preprocessor={
        "image_processor_type": "Gemma4UnifiedImageProcessor",
        "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
        "max_soft_tokens": 70,
        "do_normalize": False,
    },
    processor={"processor_class": "Gemma4UnifiedProcessor"},
)

#: Their pictures are laid out as another family's, which is tried each time.
LIKE_ANOTHER = ("pixtral", "llava_onevision", "glm4v_moe", "glm46v", "gemma4_moe")


def make_tiny_family(
    tiny: Tiny, path: Path, text: Callable[..., dict[str, Any]], normalisation: dict[str, Any]
) -> None:
    """Build a model in ``path``. ``text`` makes the fields of its text config, of a vocabulary's size."""
    tokenizer: Any = AutoTokenizer.from_pretrained(weights_dir(), extra_special_tokens=tiny.named)
    tokenizer.add_tokens([tiny.image, *filter(None, [tiny.rows]), *tiny.tokens], special_tokens=True)
    tokenizer.chat_template = (
        (weights_dir() / "chat_template.jinja")
        .read_text()
        .replace("<|vision_start|><|image_pad|><|vision_end|>", tiny.shown or tiny.image)
    )
    for kind, token in (("audio", tiny.audio), ("video", tiny.video)):
        if token:
            image = tiny.shown or tiny.image
            shown = f"{{%- elif part['type'] == '{kind}' -%}}{token}"
            tokenizer.chat_template = tokenizer.chat_template.replace(image, image + shown, 1)
    fields = dict(tiny.text)
    if fields.get("hidden_size_per_layer_input"):  # else transformers takes 262144 tokens, which are 150 MB
        fields["vocab_size_per_layer_input"] = len(tokenizer)
    config = AutoConfig.for_model(
        tiny.model_type,
        text_config=text(len(tokenizer), **fields),
        vision_config=tiny.vision,
        **{tiny.image_field: tokenizer.convert_tokens_to_ids(tiny.rows or tiny.image)},
        **{
            name: tokenizer.convert_tokens_to_ids(value) if re.search("_token_(id|index)$", name) else value
            for name, value in tiny.top.items()
        },
    )
    model: Any = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():  # a projector that begins with nothing
            torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({**normalisation, **tiny.preprocessor}))
    (path / "processor_config.json").write_text(json.dumps(tiny.processor))
    if tiny.video:
        (path / "video_preprocessor_config.json").write_text(json.dumps(tiny.videos))
