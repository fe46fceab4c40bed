"""The sizes of a model that determine the cost of its stages, from a transformers config or known by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Bytes of a value in half precision.
HALF_BYTES = 2
#: Largest aspect ratio of an image that the processors of Qwen2-VL and later accept.
_MAX_ASPECT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """Layers with a recurrent state instead of K and V, such as gated delta nets.

    Attributes:
        num_layers: number of such layers.
        parameters: parameters of one layer's matrices, without its feed-forward.
        convolution_values: size of one layer's convolution state, in values of the model's dtype.
        recurrent_values: size of one layer's recurrent state, in float32 values.
    """

    num_layers: int
    parameters: int
    convolution_values: int
    recurrent_values: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageShape:
    """A decoder-only transformer with a gated feed-forward of three matrices.

    Attributes:
        head_dim: head size in the layers with the narrowest heads.
        states: its layers with a recurrent state, if any.
        kv_widths: values of K that a token adds to each layer with K and V; empty if all layers are alike.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    states: StateShape | None = None
    kv_widths: tuple[int, ...] = ()

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, to their own K and V or an earlier layer's."""
        return self.num_layers - (self.states.num_layers if self.states else 0)

    @property
    def num_kv_layers(self) -> int:
        """Planes of the KV cache: one for each layer with K and V; wider layers have several."""
        if not self.kv_widths:
            return self.num_attention_layers
        return sum(self.kv_widths) // math.gcd(*self.kv_widths)

    @property
    def kv_values(self) -> int:
        """Values of K and V that one token adds in all layers."""
        return 2 * (sum(self.kv_widths) or self.num_attention_layers * self.num_kv_heads * self.head_dim)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of all layers."""
        queries = 2 * self.num_attention_layers * self.hidden * self.head_dim * self.num_heads
        recurrent = self.states.num_layers * self.states.parameters if self.states else 0
        fed_forward = 3 * self.num_layers * self.hidden * self.intermediate
        return queries + self.hidden * self.kv_values + recurrent + fed_forward

    @property
    def parameters(self) -> int:
        """Parameters that compute a token: all layers and the output head."""
        return self.layer_parameters + self.hidden * self.vocabulary

    def state_bytes(self, value_bytes: int) -> int:
        """Return the bytes of a sequence's recurrent state."""
        if self.states is None:
            return 0
        one = self.states
        return one.num_layers * (one.convolution_values * value_bytes + one.recurrent_values * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """A vision transformer over square patches; each token is made of ``merge`` × ``merge`` patches.

    Attributes:
        num_matrices: matrices of its feed-forward: 2, or 3 if it is gated.
        tokens_per_image: tokens of an image for towers with one image size; None if they depend on the pixels.
        window_patches: patches that one attends to in all but ``num_full_layers`` layers; None for all of them.
        min_pixels, max_pixels: bounds to which the processor resizes an image.
    """

    num_layers: int
    hidden: int
    intermediate: int
    patch_size: int
    merge: int = 1
    num_matrices: int = 2
    tokens_per_image: int | None = None
    window_patches: int | None = None
    num_full_layers: int = 0
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 16384

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + self.num_matrices * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        return self.num_layers * self.layer_parameters

    @property
    def pixels_per_token(self) -> int:
        return (self.patch_size * self.merge) ** 2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which the processors of Qwen2-VL and later resize an image.

        Raises ValueError for an aspect ratio that they refuse.
        """
        if self.tokens_per_image is not None:
            side = math.isqrt(self.tokens_per_image) * self.patch_size * self.merge
            return side, side
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise ValueError(f"its longer side is more than {_MAX_ASPECT} times the shorter one")
        side, area = self.patch_size * self.merge, width * height
        near = [round(length / side) * side for length in (width, height)]
        if near[0] * near[1] > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            near = [max(side, math.floor(length / shrink / side) * side) for length in (width, height)]
        elif near[0] * near[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / area)
            near = [math.ceil(length * grow / side) * side for length in (width, height)]
        return near[0], near[1]

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image. Raises as :meth:`resized`."""
        if self.tokens_per_image is not None:
            return self.tokens_per_image
        width, height = self.resized(width, height)
        return width * height // self.pixels_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model, text-only if ``vision`` is None; ``max_positions`` is its longest context in tokens."""

    name: str
    language: LanguageShape
    vision: VisionShape | None = None
    value_bytes: int = HALF_BYTES
    max_positions: int = 32768

    @property
    def kv_token_bytes(self) -> int:
        return self.language.kv_values * self.value_bytes

    @property
    def state_bytes(self) -> int:
        return self.language.state_bytes(self.value_bytes)

    @property
    def feature_token_bytes(self) -> int:
        return self.language.hidden * self.value_bytes


_CLIP_L = VisionShape(num_layers=24, hidden=1024, intermediate=4096, patch_size=14, tokens_per_image=576)
_QWEN2_TOWER = VisionShape(num_layers=32, hidden=1280, intermediate=5120, patch_size=14, merge=2)
_QWEN25_TOWER = VisionShape(
    num_layers=32,
    hidden=1280,
    intermediate=3420,
    patch_size=14,
    merge=2,
    num_matrices=3,
    window_patches=64,
    num_full_layers=4,
)


def _decoder(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, words: int) -> LanguageShape:
    return LanguageShape(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        intermediate=ffn,
        vocabulary=words,
    )


_QWEN_7B = _decoder(28, 3584, 28, 4, 18944, 152064)
_QWEN3_TOWER = VisionShape(
    num_layers=27,
    hidden=1152,
    intermediate=4304,
    patch_size=16,
    merge=2,
    min_pixels=256 * 256,
    max_pixels=4096 * 4096,
)
#: Published sizes of the papers' models: name on the hub, language model, tower, longest context.
_PUBLISHED = {
    "llava-1.5-7b": ("llava-hf/llava-1.5-7b-hf", _decoder(32, 4096, 32, 32, 11008, 32064), _CLIP_L, 4096),
    "llava-1.5-13b": ("llava-hf/llava-1.5-13b-hf", _decoder(40, 5120, 40, 40, 13824, 32064), _CLIP_L, 4096),
    "llava-1.6-34b": ("llava-hf/llava-v1.6-34b-hf", _decoder(60, 7168, 56, 8, 20480, 64064), _CLIP_L, 4096),
    "qwen2-vl-7b": ("Qwen/Qwen2-VL-7B-Instruct", _QWEN_7B, _QWEN2_TOWER, 32768),
    "qwen2.5-vl-7b": ("Qwen/Qwen2.5-VL-7B-Instruct", _QWEN_7B, _QWEN25_TOWER, 128000),
    "qwen2.5-vl-72b": (
        "Qwen/Qwen2.5-VL-72B-Instruct",
        _decoder(80, 8192, 64, 8, 29568, 152064),
        _QWEN25_TOWER,
        128000,
    ),
    "qwen3-vl-8b": ("Qwen/Qwen3-VL-8B-Instruct", _decoder(36, 4096, 32, 8, 12288, 151936), _QWEN3_TOWER, 262144),
}
KNOWN_SHAPES: dict[str, ModelShape] = {
    name: ModelShape(name=name, language=language, vision=tower, max_positions=most)
    for name, (_, language, tower, most) in _PUBLISHED.items()
}
#: The names of :data:`KNOWN_SHAPES` on the Hugging Face hub.
HUB_NAMES = {name: hub for name, (hub, *_) in _PUBLISHED.items()}
_BY_HUB_NAME = {hub: name for name, hub in HUB_NAMES.items()}

_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
#: transformers' defaults for sizes missing in a config.json, by model_type.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "gemma3_text": {"head_dim": 256},
    **{name: {"head_dim": 256, "num_key_value_heads": 4} for name in _GEMMA4},
    "clip_vision_model": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "patch_size": 32,
        "image_size": 224,
    },
}


def shape_of(model: str) -> ModelShape:
    """Return the shape of a model by its name (here or on the hub), its directory or its config.json.

    Raises ValueError with the missing part.
    """
    if (name := _BY_HUB_NAME.get(model, model)) in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    known = ", ".join(KNOWN_SHAPES)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model {model!r}: no such directory or config.json; known names are {known}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"model {model!r}: {path} is not a transformers config: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model {model!r}: {path} is not a transformers config: expected an object")
    name = path.parent.name if path.name == "config.json" else path.stem
    return shape_from_config(config, name or "model")


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape in the content of a config.json. Raises ValueError for a missing size."""
    config = config.get("thinker_config") or config
    text = config.get("text_config") or config.get("llm_config") or config
    read = _Reader(name, text)
    hidden, heads = read("hidden_size"), read("num_attention_heads")
    language = LanguageShape(
        num_layers=read("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=read("num_key_value_heads", default=heads),
        head_dim=read("head_dim", default=hidden // heads),
        intermediate=read("intermediate_size"),
        vocabulary=read("vocab_size", default=config.get("vocab_size")),
        states=_states(read, hidden),
        kv_widths=_kv_widths(read),
    )
    tower = config.get("vision_config")
    vision = _vision(_Reader(f"{name}, vision_config", tower), config) if isinstance(tower, Mapping) else None
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    return ModelShape(
        name=name,
        language=language,
        vision=vision,
        value_bytes=4 if "float32" in dtype else 2,
        max_positions=read("max_position_embeddings", default=32768),
    )


def _kinds(read: _Reader) -> list[str]:
    """Return the ``layer_types`` as transformers' classes fill them in."""
    text, count = read.config, read("num_hidden_layers")
    if kinds := text.get("layer_types"):
        return list(kinds)
    every, other = 1, ""
    if "linear_num_value_heads" in text:
        every, other = read("full_attention_interval", default=4), "linear_attention"
    elif text.get("model_type") in _GEMMA4:
        every, other = 6, "sliding_attention"
    kinds = [other if number % every else "full_attention" for number in range(1, count + 1)]
    return [*kinds[:-1], "full_attention"] if other == "sliding_attention" else kinds


def _kv_widths(read: _Reader) -> tuple[int, ...]:
    """Return Gemma 4's widths: full attention has other heads, and the last layers reuse K and V."""
    text = read.config
    if text.get("model_type") not in _GEMMA4:
        return ()
    own = text.get("per_layer_config")
    if own is None:
        full = {"head_dim": text.get("global_head_dim") or 512}
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            full["num_key_value_heads"] = text["num_global_key_value_heads"]
        own = {str(index): full for index, kind in enumerate(_kinds(read)) if kind == "full_attention"}
    usual = {name: read(name) for name in ("num_key_value_heads", "head_dim")}
    layers = [{**usual, **own.get(str(index), {})} for index in range(read("num_hidden_layers"))]
    num_writing = len(layers) - (text.get("num_kv_shared_layers") or 0)
    return tuple(layer["num_key_value_heads"] * layer["head_dim"] for layer in layers[:num_writing])


def _states(read: _Reader, hidden: int) -> StateShape | None:
    """Return the shape of the gated delta nets, if any."""
    if "linear_num_value_heads" not in read.config:
        return None
    heads, width = read("linear_num_value_heads"), read("linear_value_head_dim")
    key_width, kernel = read("linear_key_head_dim"), read("linear_conv_kernel_dim", default=4)
    values, convolved = heads * width, 2 * read("linear_num_key_heads") * key_width + heads * width
    return StateShape(
        num_layers=_kinds(read).count("linear_attention"),
        parameters=hidden * (convolved + 2 * values + 2 * heads),
        convolution_values=convolved * kernel,
        recurrent_values=heads * key_width * width,
    )


#: Fields and a tower of models whose number of tokens depends on an image's size or tiles.
_ANY_SIZE = {"spatial_merge_size", "downsample_ratio", "scale_factor", "image_grid_pinpoints", "pixtral"}


def _vision(read: _Reader, model: Mapping[str, Any]) -> VisionShape:
    if "mm_embed_dim" in read.config:  # a projection instead of a tower; it counts as a layer
        width, merge = read("mm_embed_dim"), read("pooling_kernel_size", default=3)
        patch = read("patch_size", default=16)
        return VisionShape(num_layers=1, hidden=width, intermediate=width, patch_size=patch, merge=merge)
    is_windowed = bool(read.config.get("window_size"))
    # Qwen2-VL calls the tower's width embed_dim and the language model's hidden_size.
    hidden = read("embed_dim", default=None) if "embed_dim" in read.config else read("hidden_size")
    patch = read("patch_size")
    layers = read("depth") if "depth" in read.config else read("num_hidden_layers")
    ratio = read.config.get("mlp_ratio")
    image_size = read.config.get("image_size") or read.defaults.get("image_size")
    has_one_size = not _ANY_SIZE & {*model, *read.config, str(read.config.get("model_type"))}
    fixed = (int(image_size) // patch) ** 2 if image_size and has_one_size else None
    if ratio_of_sides := model.get("downsample_ratio"):
        merge = round(1 / float(ratio_of_sides))
    else:
        default = model.get("spatial_merge_size") or model.get("scale_factor") or 1
        merge = read("spatial_merge_size", default=default)
    if fixed and (pooled := model.get("mm_tokens_per_image")):
        fixed, merge = int(pooled), math.isqrt(fixed // int(pooled))
    full = read.config.get("fullatt_block_indexes") or []
    return VisionShape(
        num_layers=layers,
        hidden=hidden,
        intermediate=int(hidden * ratio) if ratio else read("intermediate_size"),
        patch_size=patch,
        merge=merge,
        num_matrices=3 if is_windowed else 2,
        tokens_per_image=fixed,
        window_patches=(int(read.config["window_size"]) // patch) ** 2 if is_windowed else None,
        num_full_layers=len(full),
    )


class _Reader:
    """Reads positive integers from a section of a config."""

    def __init__(self, section: str, config: Mapping[str, Any]) -> None:
        self.section = section
        self.config = config
        self.defaults = _DEFAULTS.get(str(config.get("model_type")), {})

    def __call__(self, key: str, *, default: object = None) -> int:
        value = self.config.get(key)
        if isinstance(value, list) and value:  # one side for each axis
            value = value[0]
        if value is None:
            value = self.defaults.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 1:
            raise ValueError(f"{self.section}: {key} is {value!r}, not a positive number")
        return int(value)
