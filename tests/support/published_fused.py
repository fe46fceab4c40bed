"""Published configurations of families whose language model the fused decoder computes."""

from __future__ import annotations

from typing import Any

_QWEN_TOKENS = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_QWEN2 = {
    **_QWEN_TOKENS,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "vocab_size": 152064,
}
_QWEN2_TOWER = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "patch_size": 14}
_QWEN2_TOWER |= {"spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}
_QWEN25_TOWER = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
QWEN3_TOWER = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _qwen2(kind: str, tower: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, kv: int) -> Any:
    """As the Qwen2-VL and Qwen2.5-VL checkpoints have it: the text's fields at the top level."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_window_layers": layers}
    width = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    return {**_QWEN2, **sizes, **counts, "model_type": kind, "vision_config": {**tower, width: hidden}}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **tower: Any) -> Any:
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    }
    tower = {**QWEN3_TOWER, "model_type": "qwen3_vl", "out_hidden_size": hidden, **tower}
    return {
        **_QWEN_TOKENS,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
    }


def _llava(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Any:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "torch_dtype": "float16",
        "transformers_version": "4.36.0.dev0",
        "vision_config": vision,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
        **more,
    }


_MISTRAL_7B = {
    "max_position_embeddings": 32768,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "sliding_window": None,
    "vocab_size": 32064,
}
_VICUNA = {
    "_name_or_path": "lmsys/vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pad_token_id": 0,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32064,
}
_CLIP = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
}
SIGLIP = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 26,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN3_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
_QWEN3_SMALL_TOWER |= {"deepstack_visual_indexes": [5, 11, 17]}
FUSED: dict[str, Any] = {
    "Qwen2-VL-2B": _qwen2("qwen2_vl", _QWEN2_TOWER, 1536, 8960, 28, 12, 2) | {"tie_word_embeddings": True},
    "Qwen2-VL-7B": _qwen2("qwen2_vl", _QWEN2_TOWER, 3584, 18944, 28, 28, 4),
    "Qwen2-VL-72B": _qwen2("qwen2_vl", _QWEN2_TOWER, 8192, 29568, 80, 64, 8),
    "Qwen2.5-VL-3B": _qwen2("qwen2_5_vl", _QWEN25_TOWER, 2048, 11008, 36, 16, 2) | {"tie_word_embeddings": True},
    "Qwen2.5-VL-7B": _qwen2("qwen2_5_vl", _QWEN25_TOWER, 3584, 18944, 28, 28, 4),
    "Qwen2.5-VL-32B": _qwen2("qwen2_5_vl", {**_QWEN25_TOWER, "intermediate_size": 3456}, 5120, 27648, 64, 40, 8),
    "Qwen2.5-VL-72B": _qwen2("qwen2_5_vl", {**_QWEN25_TOWER, "intermediate_size": 3456}, 8192, 29568, 80, 64, 8),
    "Qwen3-VL-2B": _qwen3(2048, 6144, 28, 16, **_QWEN3_SMALL_TOWER),
    "Qwen3-VL-4B": _qwen3(2560, 9728, 36, 32, **_QWEN3_SMALL_TOWER),
    "Qwen3-VL-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-VL-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen2.5-Omni-7B": {
        "architectures": ["Qwen2_5OmniModel"],
        "enable_audio_output": True,
        "enable_talker": True,
        "model_type": "qwen2_5_omni",
        "thinker_config": {
            "audio_config": {
                "activation_function": "gelu",
                "d_model": 1280,
                "encoder_attention_heads": 20,
                "encoder_ffn_dim": 5120,
                "encoder_layerdrop": 0.0,
                "encoder_layers": 32,
                "init_std": 0.02,
                "max_source_positions": 1500,
                "model_type": "qwen2_5_omni_audio_encoder",
                "n_window": 100,
                "num_hidden_layers": 32,
                "num_mel_bins": 128,
                "output_dim": 3584,
                "scale_embedding": False,
            },
            "audio_end_token_id": 151648,
            "audio_start_token_id": 151647,
            "audio_token_index": 151646,
            "ignore_index": -100,
            "image_token_index": 151655,
            "init_std": 0.02,
            "model_type": "qwen2_5_omni_thinker",
            "pad_token_id": 151643,
            "position_id_per_seconds": 25,
            "seconds_per_chunk": 2,
            "text_config": {
                **{name: value for name, value in _QWEN2.items() if not name.endswith("_token_id")},
                "hidden_size": 3584,
                "init_std": 0.02,
                "intermediate_size": 18944,
                "max_window_layers": 28,
                "model_type": "qwen2_5_omni_text",
                "num_attention_heads": 28,
                "num_hidden_layers": 28,
                "num_key_value_heads": 4,
                "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            },
            "user_token_id": 872,
            "video_token_index": 151656,
            "vision_config": {
                **_QWEN25_TOWER,
                "embed_dim": 1280,
                "in_channels": 3,
                "model_type": "qwen2_5_omni_vision_encoder",
                "out_hidden_size": 3584,
                "tokens_per_second": 25,
            },
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
            "vision_token_id": 151654,
        },
    },
    "LLaVA-1.5-7B": _llava(_VICUNA, _CLIP),
    "LLaVA-1.5-13B": _llava(
        {**_VICUNA, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40}
        | {"num_hidden_layers": 40, "num_key_value_heads": 40, "rope_scaling": None},
        _CLIP,
    ),
    "LLaVA-interleave": _llava(
        {"model_type": "qwen2", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"num_hidden_layers": 24, "use_sliding_window": False, "tie_word_embeddings": True},
        SIGLIP,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "LLaVA-NeXT-Mistral": {
        **_llava({"model_type": "mistral", "intermediate_size": 14336, **_MISTRAL_7B}, _CLIP),
        "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "use_image_newline_parameter": True,
    },
    "Mistral-Small-3.1": {
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rope_theta": 1e9,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "vision_config": {
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "image_size": 1540,
            "intermediate_size": 4096,
            "model_type": "pixtral",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "rope_theta": 1e4,
        },
        "vision_feature_layer": -1,
    },
    "Qwen3-30B-A3B": {
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
