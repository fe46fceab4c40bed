"""Tiny models of every family that the native engine runs, with any field of their configuration changed.

The oracle is transformers' ``generate``; ours is what an instance computes: pictures and sounds through the
towers, tokens and features through the paged decoder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sounds import tune
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    Qwen3ASRFeatureExtractor,
    WhisperFeatureExtractor,
)

from device.base import AttnMeta
from device.registry import get_device
from epd_serve.models.decoder import StepContext
from epd_serve.models.families import TEXT
from epd_serve.models.family import TowerInputs, sound
from epd_serve.models.family import picture as sized
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.protocol.wire import MediaRef

#: name → (model type, text type, type of the tower that sees; of one that hears alone: that tower's)
FAMILIES = {
    "qwen2_vl": ("qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "llava-llama-clip": ("llava", "llama", "clip_vision_model"),
    "llava-llama-siglip": ("llava", "llama", "siglip_vision_model"),
    "llava-mistral-clip": ("llava", "mistral", "clip_vision_model"),
    "llava-qwen2-clip": ("llava", "qwen2", "clip_vision_model"),
    "llava-qwen3-clip": ("llava", "qwen3", "clip_vision_model"),
    "internvl": ("internvl", "qwen3", "internvl_vision"),
    "mistral3": ("mistral3", "mistral", "pixtral"),
    "pixtral": ("llava", "mistral", "pixtral"),
    "next-clip": ("llava_next", "llama", "clip_vision_model"),
    "next-siglip": ("llava_next", "llama", "siglip_vision_model"),
    "onevision": ("llava_onevision", "qwen2", "siglip_vision_model"),
    "gemma3": ("gemma3", "gemma3_text", "siglip_vision_model"),
    "gemma4": ("gemma4", "gemma4_text", "gemma4_vision"),
    "gemma4_unified": ("gemma4_unified", "gemma4_unified_text", "gemma4_unified_vision"),
    "glm4v": ("glm4v", "glm4v_text", "glm4v_vision"),
    "qwen3_5": ("qwen3_5", "qwen3_5_text", "qwen3_5_vision"),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_vision"),
    "glm4v_moe": ("glm4v_moe", "glm4v_moe_text", "glm4v_moe_vision"),
    "glm46v": ("glm46v", "glm4v_text", "glm4v_vision"),
    "qwen2_5_omni": ("qwen2_5_omni_thinker", "qwen2_5_omni_text", "qwen2_5_omni_vision_encoder"),
    "qwen3_omni": ("qwen3_omni_moe_thinker", "qwen3_omni_moe_text", "qwen3_omni_moe_vision_encoder"),
    "qwen2_audio": ("qwen2_audio", "qwen2", "qwen2_audio_encoder"),
    "qwen3_asr": ("qwen3_asr", "qwen3", "qwen3_asr_encoder"),
    **{name: (name, name, "") for name in TEXT},
}
#: Families whose pictures are tiles or rows. Their language models are other families'.
TILED = ("internvl", "mistral3", "pixtral", "next-clip", "next-siglip", "onevision")
#: Families that take sounds alone. Their language models are other families', too.
SOUNDS = ("qwen2_audio", "qwen3_asr")
_EARS = {
    "qwen2_5_omni": "qwen2_5_omni_audio_encoder",
    "qwen3_omni": "qwen3_omni_moe_audio_encoder",
    "gemma4": "gemma4_audio",
    "gemma4_unified": "gemma4_unified_audio",
}
IMAGE_TOKEN, VIDEO_TOKEN, START, END, AUDIO_TOKEN = 5, 6, 7, 8, 10
NUM_NEW_TOKENS = 4
_BLOCK_SIZE = 16
_PICTURE = (70, 50)
_RATE = 16_000

Change = tuple[str, str, Any]  # part ("", "text_config", "vision_config" or "audio_config"), field, value


class CannotBuild(Exception):
    """transformers itself does not run this model."""


def config_of(family: str, *changes: Change) -> dict[str, Any]:
    """The content of a config.json. Sizes that must agree with a changed one follow it."""
    model_type, text_type, tower_type = FAMILIES[family]
    if not tower_type:
        return _text(text_type) | {field: value for _, field, value in changes}
    parts: dict[str, dict[str, Any]] = {"": {}, "text_config": _text(text_type)}
    if family not in SOUNDS:
        parts["vision_config"] = _vision(tower_type)
    if family in SOUNDS or family in _EARS:
        parts["audio_config"] = _audio(family)
    for part, field, value in changes:
        parts[part][field] = value
    top, text = parts[""], parts["text_config"]
    changed = {(part, field) for part, field, _ in changes}
    if "output_dim" in parts.get("audio_config", ()) and ("audio_config", "output_dim") not in changed:
        parts["audio_config"]["output_dim"] = text["hidden_size"]
    if family in SOUNDS:
        name = "audio_token_index" if family == "qwen2_audio" else "audio_token_id"
        return {"model_type": model_type, name: AUDIO_TOKEN, **top, **_own(parts)}
    vision = parts["vision_config"]
    if model_type.startswith("qwen"):
        width = "hidden_size" if tower_type == "qwen2_vl_vision" else "out_hidden_size"
        if ("vision_config", width) not in changed:
            vision[width] = text["hidden_size"]
        half = (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
        turned = {"partial_rotary_factor": 0.5} if model_type.startswith("qwen3_5") else {}
        half = half // 2 if turned else half
        sections = [half - 2 * (half // 3), half // 3, half // 3]
        text["rope_parameters"] = {"mrope_section": sections, **turned, **text["rope_parameters"]}
        tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
        tokens |= {"vision_start_token_id": START, "vision_end_token_id": END}
        if family in _EARS:
            tokens["audio_token_id"] = AUDIO_TOKEN
            tokens |= {"audio_start_token_id": START + 4, "audio_end_token_id": END + 4}
    elif model_type.startswith("glm4"):
        if ("vision_config", "out_hidden_size") not in changed:
            vision["out_hidden_size"] = text["hidden_size"]
        quarter = text["hidden_size"] // text["num_attention_heads"] // 4
        sections = [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3]
        partial = {"mrope_section": sections, "partial_rotary_factor": 0.5}
        text["rope_parameters"] = {**partial, **text["rope_parameters"]}
        tokens = {"image_token_id": IMAGE_TOKEN}
    elif model_type in ("internvl", "gemma4", "gemma4_unified"):
        tokens = {"image_token_id": IMAGE_TOKEN}
        if model_type.startswith("gemma4"):
            tokens["audio_token_id"] = AUDIO_TOKEN
    elif model_type == "gemma3":
        tokens = {"image_token_index": IMAGE_TOKEN, "boi_token_index": START, "eoi_token_index": END}
        top.setdefault("mm_tokens_per_image", 4)
        vision.setdefault("vision_use_head", False)
    else:
        tokens = {"image_token_index": IMAGE_TOKEN}
    if model_type in ("llava_next", "llava_onevision"):
        side = vision["image_size"]
        top.setdefault("image_grid_pinpoints", [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]])
    if model_type == "llava_next" and tower_type == "siglip_vision_model":
        top.setdefault("vision_feature_select_strategy", "full")
    if family == "pixtral":
        top.setdefault("vision_feature_select_strategy", "full")
    return {"model_type": model_type, **tokens, **top, **_own(parts)}


def _own(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parts below the top level."""
    return {name: part for name, part in parts.items() if name}


def _text(model_type: str) -> dict[str, Any]:
    text: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    if model_type.startswith("qwen3"):
        text["head_dim"] = 24
    if model_type.startswith("qwen3_5"):
        text |= {"full_attention_interval": 2}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 12, "linear_value_head_dim": 16}
    if model_type == "qwen3_5_moe_text":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 24}
    if model_type == "gemma3_text":
        text |= {"head_dim": 24, "sliding_window": 12, "sliding_window_pattern": 2, "rope_parameters": None}
    if model_type.startswith("gemma4"):
        text |= {"head_dim": 24, "global_head_dim": 48, "sliding_window": 12, "rope_parameters": None}
        text |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        if model_type == "gemma4_text":
            text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    if model_type == "glm4v_moe_text":
        text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if model_type in ("qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    return text


def _vision(model_type: str) -> dict[str, Any]:
    vision: dict[str, Any] = {"model_type": model_type, "hidden_size": 32, "initializer_range": 0.2}
    if model_type.startswith("glm4v"):
        sides = {"image_size": 56, "patch_size": 14}
        return vision | {"intermediate_size": 48, "depth": 2, "num_heads": 2} | sides
    if model_type == "gemma4_unified_vision":
        sizes = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 80}
        return {"model_type": model_type, "initializer_range": 0.2, **sizes}
    if model_type == "gemma4_vision":
        vision |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        return vision | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 512}
    if not model_type.startswith("qwen"):
        sides = {"image_size": 84 if model_type == "pixtral" else 28, "patch_size": 14}
        return vision | {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2} | sides
    vision |= {"depth": 2, "num_heads": 2, "patch_size": 14}
    if model_type == "qwen2_vl_vision":
        return vision | {"embed_dim": 32, "mlp_ratio": 2}
    vision |= {"intermediate_size": 48}
    if model_type in ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder"):
        return vision | {"window_size": 56, "fullatt_block_indexes": [1]}
    vision |= {"num_position_embeddings": 64}
    return vision if model_type.startswith("qwen3_5") else vision | {"deepstack_visual_indexes": [0, 1]}


def _audio(family: str) -> dict[str, Any]:
    audio: dict[str, Any]
    if family == "gemma4_unified":
        return {"model_type": _EARS[family], "initializer_range": 0.2, "audio_embed_dim": 160}
    if family == "gemma4":
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24}
        chunks = {"subsampling_conv_channels": [16, 8], "attention_chunk_size": 4, "attention_context_left": 5}
        return {"model_type": _EARS[family], "initializer_range": 0.2, **size, **chunks}
    audio = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32}
    audio |= {"num_mel_bins": 16, "max_source_positions": 100, "initializer_range": 0.2}
    if family == "qwen2_5_omni":
        audio |= {"n_window": 8, "output_dim": 0}
    if family in ("qwen3_asr", "qwen3_omni"):
        audio |= {"n_window_infer": 100, "output_dim": 0, "downsample_hidden_size": 8}
    if family == "qwen3_asr":
        del audio["max_source_positions"]
    return {"model_type": _EARS.get(family, FAMILIES[family][2]), **audio}


def _extractor(config: Any) -> dict[str, Any]:
    """The file of a feature extractor that is the tower's."""
    if config.model_type == "gemma4_unified":
        kind, size = "Gemma4UnifiedAudioFeatureExtractor", config.audio_config.audio_embed_dim
        return {"feature_extractor_type": kind, "feature_size": size, "audio_samples_per_token": size}
    if config.model_type == "gemma4":
        size = config.audio_config.subsampling_conv_channels[0]
        return {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": size}
    audio = config.audio_config
    chunk = getattr(audio, "max_source_positions", 100) // 50
    kind = Qwen3ASRFeatureExtractor if config.model_type == "qwen3_asr" else WhisperFeatureExtractor
    more = {"n_window": audio.n_window} if config.model_type == "qwen3_asr" else {}
    return dict(kind(feature_size=audio.num_mel_bins, chunk_length=chunk, **more).to_dict())


def _preprocessor(config: Any) -> dict[str, Any]:
    ears = _extractor(config) if getattr(config, "audio_config", None) else {}
    if not hasattr(config, "vision_config"):
        return ears
    vision = config.vision_config
    normalised = {"do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    side: Any = getattr(vision, "image_size", 0)
    square = {"height": side, "width": side}
    if vision.model_type == "pixtral":
        size = {"longest_edge": 84}
        return {"image_processor_type": "PixtralImageProcessor", "size": size, **normalised}
    if config.model_type == "gemma3":
        return {"image_processor_type": "Gemma3ImageProcessor", "size": square, **normalised}
    if config.model_type.startswith("gemma4"):
        is_whole = config.model_type == "gemma4"
        kind = "Gemma4ImageProcessor" if is_whole else "Gemma4UnifiedImageProcessor"
        sizes = {name: getattr(vision, name) for name in ("patch_size", "pooling_kernel_size")}
        normalised |= {"image_processor_type": kind, "do_normalize": is_whole}
        return {**ears, "max_soft_tokens": 70, **sizes, **normalised}
    if config.model_type == "llava":
        return {"image_processor_type": "SiglipImageProcessor", "size": square, **normalised}
    if config.model_type == "internvl":
        square = square if isinstance(side, int) else dict(zip(("height", "width"), side, strict=True))
        return {"image_processor_type": "GotOcr2ImageProcessor", "size": square, "max_patches": 4, **normalised}
    if config.model_type in ("llava_next", "llava_onevision"):
        kind = {"llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[config.model_type]
        sizes = {"size": square, "crop_size": square, "image_grid_pinpoints": config.image_grid_pinpoints}
        return {"image_processor_type": f"{kind}ImageProcessor", **sizes, **normalised}
    kind, frames = ("Glm4v", 2) if config.model_type.startswith("glm4") else ("Qwen2VL", 1)
    kind = "Glm46V" if config.model_type == "glm46v" else kind
    return {
        **ears,
        "image_processor_type": f"{kind}ImageProcessor",
        "size": {"shortest_edge": frames * 28 * 28, "longest_edge": frames * 112 * 112},
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        **normalised,
    }


def _options(config: Any) -> dict[str, Any]:
    """What a family's processor tells its image processor."""
    if config.model_type == "internvl":
        return {"crop_to_patches": True}
    if config.vision_config.model_type == "pixtral":
        return {"patch_size": config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)}
    return {}


@dataclass(frozen=True)
class Answer:
    """A greedy answer to :func:`_ids` and media: its tokens, and the logits [tokens, vocab] they come from."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor


def generate(path: Path, config: dict[str, Any]) -> Answer:
    """Save a model of random weights in ``path`` and let transformers answer. Raises CannotBuild."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    try:
        read = AutoConfig.from_pretrained(path)
        torch.manual_seed(0)
        takes_media = hasattr(read, "vision_config") or getattr(read, "audio_config", None)
        auto: Any = AutoModelForMultimodalLM if takes_media else AutoModelForCausalLM
        model: Any = auto.from_config(read, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.any():  # transformers begins biases with 0, norms with 1
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        model.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(config))  # as a checkpoint of somebody else has it
        inputs: dict[str, Any] = {}
        num_rows = dict[str, int]()
        with torch.inference_mode():
            if takes_media:
                (path / "preprocessor_config.json").write_text(json.dumps(_preprocessor(read)))
            if hasattr(read, "vision_config"):
                processor: Any = AutoImageProcessor.from_pretrained(path)
                inputs = dict(processor(images=[picture()], return_tensors="pt", **_options(read)))
                for name in (
                    "num_patches",
                    "num_crops",
                    "num_soft_tokens_per_image",
                    "grids",
                    "num_patches_per_image",
                    "aspect_ratios",
                ):
                    inputs.pop(name, None)
                output = model.get_image_features(**inputs, return_dict=True)
                features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
                num_rows["image"] = sum(feature.view(-1, feature.shape[-1]).shape[0] for feature in features)
            if getattr(read, "audio_config", None):
                heard = _heard(path, read)
                num_rows["audio"] = _num_rows_heard(model, heard)
                inputs |= heard
            ids = _ids(read, num_rows)
            if len(ids) + NUM_NEW_TOKENS > read.get_text_config().max_position_embeddings:
                raise ValueError("a prompt that is longer than the context")
            tokens = torch.tensor([ids])
            if read.model_type == "gemma3":
                inputs["token_type_ids"] = (tokens == _image_token(read)).int()
            if "image_position_ids" in inputs or (
                "image_grid_thw" in inputs and not getattr(read, "audio_config", None)
            ):
                inputs["mm_token_type_ids"] = (tokens == _image_token(read)).int()
            output = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **inputs,
            )
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {str(error)[:200]}") from error
    return Answer(ids, output.sequences[0, len(ids) :].tolist(), torch.cat(output.logits))


def answer(path: Path, reference: Answer) -> Tensor:
    """Our logits of the same tokens: [tokens, vocab]. Raises ValueError for a model that is refused."""
    device = get_device("cpu")
    family = load_family(path)
    model = LanguageModel(path, torch.float32, device)
    prompt = reference.prompt
    media, items = list[TowerInputs](), list[MediaRef]()
    if "image" in family.modalities:
        media.append(family.preprocess(np.array(picture())))
        items.append(sized(_PICTURE))
    if family.audio is not None:
        media.append(family.audio.inputs(_samples(family.config)))
        items.append(sound(_seconds(family.config), _RATE))
    features = Tower(path, torch.float32, device, family=family).encode(media) if media else []
    feature_rows = list[int]()
    for item, feature in zip(items, features, strict=True):
        token = family.row_token_ids[item.modality]
        assert prompt.count(token) == len(feature) == family.num_tokens(item), "as many tokens as the tower makes"
        feature_rows += [index for index, id_ in enumerate(prompt) if id_ == token]
    positions, delta = family.positions(prompt, items, model.inner)
    ids = torch.tensor(prompt + reference.tokens[:-1])
    rest = torch.arange(len(prompt), len(ids)) + delta
    positions = torch.cat((positions, rest.expand(len(positions), -1)), dim=1)
    assert len(ids) <= model.max_model_len
    num_blocks = -(-len(ids) // _BLOCK_SIZE) + 1
    state = torch.arange(model.state_blocks(_BLOCK_SIZE)) + num_blocks
    num_all = num_blocks + len(state)
    kv = torch.zeros(model.num_layers, 2, num_all, _BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    meta = AttnMeta(
        block_size=_BLOCK_SIZE,
        slot_mapping=torch.arange(len(ids)) + _BLOCK_SIZE,
        num_decodes=0,
        decode_block_table=torch.zeros(0, 0, dtype=torch.int32),
        decode_context_lens=torch.zeros(0, dtype=torch.long),
        decode_context_lens_host=[],
        prefill_query_lens=[len(ids)],
        prefill_context_lens=[len(ids)],
        prefill_block_table=torch.arange(1, num_blocks, dtype=torch.int32)[None],
    )
    seen = [index for index, id_ in enumerate(prompt) if id_ == family.row_token_ids.get("image")]
    runs = [(seen[0], seen[-1] + 1)] if family.both_ways_tokens else []
    return model.forward(
        ids,
        positions,
        StepContext(plan=device.ops.prepare(meta, torch.float32), kv=kv, both_ways=[runs], states=state[None]),
        rows=torch.arange(len(prompt) - 1, len(ids)),
        features=torch.cat(features) if features else None,
        feature_rows=torch.tensor(feature_rows, dtype=torch.long),
    )


def picture() -> Image.Image:
    values = torch.randint(0, 256, (*reversed(_PICTURE), 3), generator=torch.Generator().manual_seed(3))
    return Image.fromarray(values.byte().numpy())


def _image_token(config: Any) -> int:
    token: int = getattr(config, "image_token_id", None) or config.image_token_index
    return token


def _seconds(config: Any) -> float:
    """Seconds of the sound: more than a window of the tower, and few tokens."""
    return 0.36 if config.model_type == "qwen2_5_omni_thinker" else 1.02


def _samples(config: Any) -> Any:
    return tune(5, _seconds(config), _RATE)[0] / np.float32(32768)


def _heard(path: Path, config: Any) -> dict[str, Tensor]:
    """The sound as the family's processor prepares it for the tower."""
    extractor = AutoFeatureExtractor.from_pretrained(path)
    if config.model_type.startswith("gemma4"):
        return dict(extractor([_samples(config)], return_tensors="pt"))
    batch = extractor(
        _samples(config),
        sampling_rate=_RATE,
        return_attention_mask=True,
        padding=True if config.model_type.startswith("qwen3") else "max_length",
        truncation=False,
        return_tensors="pt",
    )
    mask = "input_features_mask" if config.model_type == "qwen3_asr" else "feature_attention_mask"
    return {"input_features": batch["input_features"], mask: batch["attention_mask"]}


def _num_rows_heard(model: Any, inputs: dict[str, Tensor]) -> int:
    if "input_features_mask" in inputs and not hasattr(model, "get_audio_features"):  # of Gemma 4
        return int(model.model.get_audio_features(**inputs, return_dict=True).attention_mask.sum())
    if hasattr(model, "get_audio_features"):
        return len(model.get_audio_features(**inputs, return_dict=True).pooler_output)
    frames = inputs["feature_attention_mask"].sum()  # of Qwen2-Audio
    return int(model.model.audio_tower._get_feat_extract_output_lengths(frames)[1])


def _ids(config: Any, num_rows: dict[str, int]) -> list[int]:
    """Words around the tokens of a picture, a sound, or both."""
    ids = [20, 21, 22]
    for kind, around in (("image", "vision"), ("audio", "audio")):
        if kind in num_rows:
            token = _image_token(config) if kind == "image" else config.audio_token_id
            between = [token] * num_rows[kind]
            first, last = (getattr(config, f"{around}_{end}_token_id", None) for end in ("start", "end"))
            ids += [id_ for id_ in (first, *between, last) if id_ is not None]
    return [*ids, *range(30, 42)]
