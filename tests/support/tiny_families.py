"""Tiny random checkpoints of families: their configurations, tokens and processors' files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_INIT = {"initializer_range": 0.2}
_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, **_INIT}
_CLIP = {**_LAYERS, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 64}
_SIGLIP = {**_LAYERS, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
_SQUARE = {"height": 56, "width": 56}
_GRID = [[56, 112], [112, 56], [112, 112]]
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
#: transformers has these where a model's file has nothing; vLLM then leaves pixels as they are.
NORMALISATION = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One family's tiny model.

    Attributes:
        text, vision, audio, top: fields of the parts of its configuration; of the top, ids by their tokens.
        tokens: those that the built-in model's tokenizer has not. named: those that its processor asks it for.
        shown: what a chat shows of an item, by its modality.
        preprocessor, processor, videos: contents of its processors' files; empty: it has no such file.
        extractor: the class that prepares its sounds, chunk_s seconds at a time.
        seed: gives answers of many tokens.
    """

    model_type: str
    text: dict[str, Any]
    shown: dict[str, str] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    audio: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    videos: dict[str, Any] = field(default_factory=dict)
    extractor: str = ""
    chunk_s: int = 4
    seed: int = 1


def _mrope(*section: int, **extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": section, "rope_theta": 1e6, **extra}


#: Layers inside a window that is shorter than prompts and pictures, and of other frequencies than those of full
#: attention.
_GEMMA3: dict[str, Any] = {
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
_QWEN3_5: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "full", "linear")],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": _mrope(4, 2, 2, mrope_interleaved=True, partial_rotary_factor=0.5),
}
_QWEN3_5_MOE = {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 32}

# ------------------------------------------------------------------ Qwen, by the built-in model's tokens

_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_QWEN_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 140 * 140,
    **_PATCHES,
    **NORMALISATION,
}
_QWEN_VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    **_INIT,
}
_WINDOWS = {"window_size": 112, "fullatt_block_indexes": [3]}
_PLACES = {"patch_size": 14, "num_position_embeddings": 256}
_DEEPSTACK = {**_PLACES, "deepstack_visual_indexes": [0, 1, 2]}


def _qwen(name: str, text: dict[str, Any], vision: dict[str, Any], *, whole: bool = True, **top: Any) -> Tiny:
    """``whole``: bounds are those of all frames together, not of each."""
    return Tiny(
        model_type=name,
        text=text,
        vision={**_QWEN_VISION, **vision},
        top={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            **top,
        },
        shown={kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")},
        preprocessor=_QWEN_PICTURES,
        videos={
            "video_processor_type": "Qwen3VLVideoProcessor" if whole else "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": (12 if whole else 1) * 84 * 84},
            "min_frames": 4,
            "max_frames": 12,
            "fps": 2,
            **_PATCHES,
            **NORMALISATION,
        },
        seed=0,
    )


# ------------------------------------------------------------------ models that hear

_EARS: dict[str, Any] = {
    "num_mel_bins": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    **_INIT,
}
_OMNI_TOKENS = {
    **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")},
    **{f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")},
}


def _omni(name: str, processor: str, ids: str, *, text: Any, vision: Any, audio: Any) -> Tiny:
    """A model that hears and sees; ``ids`` ends the names of its tokens' fields."""
    kinds = ("image", "video", "audio")
    ends = {"start": "bos", "end": "eos"}
    top = {f"{kind}_token_{ids}": f"<|{kind.upper()}|>" for kind in kinds}
    top |= {f"{of}_{end}_token_id": f"<|{of}_{ends[end]}|>" for of in ("vision", "audio") for end in ends}
    return Tiny(
        model_type=name,
        text={"max_position_embeddings": 4096, **text},
        vision={**_QWEN_VISION, **vision},
        audio={"output_dim": 128, **_EARS, **audio},
        top=top,
        tokens=[*top.values()],
        named=_OMNI_TOKENS,
        shown={
            kind: f"<|{of}_bos|><|{kind.upper()}|><|{of}_eos|>"
            for kind, of in zip(kinds, ("vision", "vision", "audio"), strict=True)
        },
        preprocessor=_QWEN_PICTURES,
        processor={"processor_class": processor},
        extractor="WhisperFeatureExtractor",
        seed=0,
    )


# ------------------------------------------------------------------ families with media tokens of their own


def _pixtral(name: str, merge: int, **top: Any) -> Tiny:
    return Tiny(
        model_type=name,
        text={"model_type": "mistral", "sliding_window": None, "head_dim": 32},
        vision={**_LAYERS, "model_type": "pixtral", "image_size": 140, "patch_size": 14},
        top={"image_token_index": "[IMG]", **top},
        tokens=["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        shown={"image": "[IMG]"},
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
        text={"rope_parameters": _mrope(4, 2, 2, partial_rotary_factor=0.5, rope_theta=1e4), **text},
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
        top={
            "image_token_id": "<|image|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        tokens=["<|image|>", "<|begin_of_image|>", "<|end_of_image|>"],
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
        shown={"image": "<|begin_of_image|><|image|><|end_of_image|>"},
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
        audio={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "output_proj_dims": 48,
            "subsampling_conv_channels": [32, 16],
            **_INIT,
        },
        top={
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
            "tie_word_embeddings": False,
        },
        tokens=["<|image|>", *around.values(), "<|video|>", "<|audio|>"],
        named={"image_token": "<|image|>", "audio_token": "<|audio|>", **around},
        shown={kind: f"<|{kind}|>" for kind in ("image", "video", "audio")},
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "feature_size": 32,
            "max_soft_tokens": 70,
        },
        processor={"processor_class": "Gemma4Processor"},
        videos={"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, "num_frames": 2},
    )


TINY = {
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl", {"rope_parameters": _mrope(4, 6, 6)}, _WINDOWS, whole=False, tie_word_embeddings=True
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl", {"head_dim": 32, "rope_parameters": _mrope(4, 6, 6, mrope_interleaved=True)}, _DEEPSTACK
    ),
    "qwen3_5": _qwen("qwen3_5", _QWEN3_5, _PLACES),
    "qwen3_5_moe": _qwen("qwen3_5_moe", _QWEN3_5_MOE, _PLACES),
    "llava": Tiny(
        model_type="llava",
        text={"model_type": "llama"},
        vision={**_CLIP, "initializer_range": 0.02},
        top={"image_token_index": "<|image_pad|>", "image_seq_length": 16},
        shown={"image": "<|vision_start|><|image_pad|><|vision_end|>"},
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": _SQUARE,
            "do_center_crop": True,
        },
        processor={
            "processor_class": "LlavaProcessor",
            "image_token": "<|image_pad|>",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        seed=0,
    ),
    "qwen2_audio": Tiny(
        model_type="qwen2_audio",
        text={"model_type": "qwen2"},
        audio={"model_type": "qwen2_audio_encoder", "max_source_positions": 200, **_EARS},
        top={"audio_token_index": "<|AUDIO|>"},
        tokens=["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
        shown={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        extractor="WhisperFeatureExtractor",
        seed=0,
    ),
    "qwen3_asr": Tiny(
        model_type="qwen3_asr",
        text={"model_type": "qwen3", "head_dim": 32},
        audio={"downsample_hidden_size": 16, "n_window_infer": 200, "output_dim": 128, **_EARS},
        top={"audio_token_id": "<|audio_pad|>"},
        tokens=["<|audio_pad|>", "<|audio_bos|>", "<|audio_eos|>"],
        named={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        shown={"audio": "<|audio_bos|><|audio_pad|><|audio_eos|>"},
        extractor="Qwen3ASRFeatureExtractor",
        seed=0,
    ),
    "qwen2_5_omni": _omni(
        "qwen2_5_omni_thinker",
        "Qwen2_5OmniProcessor",
        "index",
        text={"rope_parameters": _mrope(4, 6, 6)},
        vision=_WINDOWS,
        audio={"n_window": 20},
    ),
    "qwen3_omni": _omni(
        "qwen3_omni_moe_thinker",
        "Qwen3OmniMoeProcessor",
        "id",
        text={
            "rope_parameters": _mrope(4, 6, 6, mrope_interleaved=True),
            "head_dim": 32,
            "initializer_range": 0.3,  # for answers of many tokens
            **_EXPERTS,
            "mlp_only_layers": [1],
        },
        vision=_DEEPSTACK,
        audio={"downsample_hidden_size": 16, "n_window_infer": 200},
    ),
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
        top={"image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4, "downsample_ratio": 0.5},
        tokens=["<IMG_CONTEXT>"],
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        shown={"image": "<IMG_CONTEXT>"},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": _SQUARE,
            "min_patches": 1,
            "max_patches": 6,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "mistral3": _pixtral("mistral3", 2, spatial_merge_size=2),
    "pixtral": _pixtral("llava", 1, vision_feature_layer=-1, vision_feature_select_strategy="full"),
    "llava_next": Tiny(
        model_type="llava_next",
        text={"model_type": "llama"},
        vision=_CLIP,
        top={"image_token_index": "<image>", "image_grid_pinpoints": _GRID},
        tokens=["<image>"],
        shown={"image": "<image>"},
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
        top={
            "image_token_index": "<image>",
            "image_grid_pinpoints": [[56, 56], *_GRID],
            "vision_aspect_ratio": "anyres_max_2",
        },
        tokens=["<image>"],
        shown={"image": "<image>"},
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
        text={"model_type": "gemma3_text", **_GEMMA3},
        vision={**_SIGLIP, "image_size": 84, "vision_use_head": False},
        top={
            "image_token_index": "<image_soft_token>",
            "mm_tokens_per_image": 9,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "tie_word_embeddings": False,
        },
        tokens=["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        shown={"image": "<start_of_image>"},
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

_GEMMA4 = TINY["gemma4"]
TINY["gemma4_unified"] = replace(
    _GEMMA4,
    model_type="gemma4_unified",
    text={
        **{name: value for name, value in _GEMMA4.text.items() if name != "hidden_size_per_layer_input"},
        "use_bidirectional_attention": "vision",
    },
    vision={"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 280, **_INIT},
    audio={"audio_embed_dim": 640, **_INIT},
    videos={**_GEMMA4.videos, "video_processor_type": "Gemma4UnifiedVideoProcessor"},
    preprocessor={
        "image_processor_type": "Gemma4UnifiedImageProcessor",
        "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
        "max_soft_tokens": 70,
        "do_normalize": False,
    },
    processor={"processor_class": "Gemma4UnifiedProcessor"},
)

#: Kinds without a tower, with fields that differ from their text config's usual ones.
TEXT: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 48},
    "qwen3_moe": {"head_dim": 48, **_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    "gemma3_text": _GEMMA3,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
TINY |= {name: Tiny(model_type=name, text=fields, seed=0) for name, fields in TEXT.items()}
