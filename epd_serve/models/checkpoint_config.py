"""Read a checkpoint's config.json and check that the native engine supports it.

Every field is honoured by the engine, irrelevant to tokens, or has the family's default value; otherwise the model
is refused with the field's name. A field that transformers' configuration class does not declare is irrelevant
unless the model's code reads it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    cache_utils,
    masking_utils,
    modeling_rope_utils,
)
from transformers.activations import ACT2FN

from epd_serve.models.families import QUANTISED, TEXT, family_of, refusal, unknown
from epd_serve.models.family import Family, names

#: Models whose head_dim is hidden_size / num_attention_heads.
_NARROW_HEADS = ("qwen2_vl_text", "qwen2_5_vl_text")
_MROPE_MODELS = (
    *_NARROW_HEADS,
    "qwen2_5_omni_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_omni_moe_text",
)
#: Language models run by the fused decoder.
_FUSED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", *_MROPE_MODELS)
#: Fields that the fused decoder honours in all of these models. transformers runs expert layers.
_TEXT_FIELDS = names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
    "hidden_act max_position_embeddings rms_norm_eps rope_parameters attention_bias mlp_bias tie_word_embeddings",
    "use_sliding_window sliding_window max_window_layers layer_types",
    "num_experts num_experts_per_tok norm_topk_prob moe_intermediate_size decoder_sparse_step mlp_only_layers",
)
#: Fields that never affect a token. The end of a generation is read elsewhere; projection_dim belongs to CLIP's
#: head, after the layers in use; image_seq_length is counted; tokens_per_second concerns videos.
_DESCRIPTIVE = names(
    "architectures transformers_version dtype model_type initializer_range initializer_factor use_cache",
    "attention_dropout bos_token_id eos_token_id pad_token_id id2label label2id num_labels problem_type",
    "pretraining_tp chunk_size_feed_forward output_hidden_states output_router_logits router_aux_loss_coef",
    "projection_dim image_seq_length tokens_per_second",
)
_PARTS = ("text_config", "vision_config", "audio_config")
_TOWERS = {"vision_config": "image", "audio_config": "audio"}
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
#: RoPE types of transformers' own layers, which may leave some dimensions unrotated.
_GENERIC_ROPE_TYPES = (*_ROPE_TYPES, "proportional")
#: Per-layer fields honoured by the generic decoder.
_OF_LAYERS = {"head_dim", "num_key_value_heads"}


def read_config(path: Path) -> Any:
    """Return the configuration of a checkpoint, or only the text-generating part of a model that also speaks.

    Raises ValueError, with the field, its value and the supported ones, if the engine's results would differ from
    transformers'.
    """
    content, _ = PreTrainedConfig.get_config_dict(path, local_files_only=True)
    if why := refusal(content.get("thinker_config", content)):
        raise ValueError(f"{path}: {why}. With engine: vllm many more are served (docs/guide/vllm.md)")
    try:
        whole = AutoConfig.from_pretrained(path, local_files_only=True)
    except StrictDataclassError as error:  # not a ValueError
        raise ValueError(f"{path}: config.json has a value that transformers does not take: {error}") from error
    config = getattr(whole, "thinker_config", whole)
    try:
        _check_quantised("", whole)
        _check(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config


def model_class(config: Any) -> Any:
    """Return transformers' class for a configuration of a known family."""
    auto = AutoModelForCausalLM if config.model_type in TEXT else AutoModelForMultimodalLM
    return auto._model_mapping[type(config)]


def of_layers(config: Any) -> set[str]:
    """Return the fields of a language model's configuration with values per layer."""
    return config.per_layer_attributes if getattr(config, "is_heterogeneous", False) else set()


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer of a language model."""
    return list(config.per_layer_config) if of_layers(config) else [config] * config.num_hidden_layers


def _check(config: Any) -> None:
    family, text = family_of(config), config.get_text_config()
    texts = family.texts if family.decoder == "generic" else dict.fromkeys(_FUSED, _TEXT_FIELDS)
    if text.model_type not in texts:
        raise ValueError(unknown("language model", text.model_type, texts))
    where = "text_config." if family.modalities else ""
    parts = [(where, text, texts[text.model_type])]
    towers = {
        name: getattr(config, name)
        for name, modality in _TOWERS.items()
        if modality in family.modalities and getattr(config, name, None) is not None
    }
    if family.modalities:
        found = [(f"{name}.", tower, family.towers[tower.model_type]) for name, tower in towers.items()]
        parts = [("", config, family.fields), *parts, *found]
    extras = [extra for part in parts for extra in _check_declared(*part)]
    _check_text(where, text, family)
    if "vision_config" in towers:
        _check_vision(towers["vision_config"])
    if "audio_config" in towers:
        _check_activations("audio_config.", towers["audio_config"])
    if extras:
        _check_read(config, extras)


def _check_declared(where: str, config: Any, honoured: frozenset[str]) -> Iterator[tuple[str, Any, str]]:
    """Refuse declared fields that the engine does not honour; yield undeclared fields."""
    _check_quantised(where, config)
    if not of_layers(config) <= (_OF_LAYERS if "per_layer_config" in honoured else set()):
        raise ValueError(
            f"{where}per_layer_config: layers must be alike; the native engine does not run per-layer values"
        )
    declared = {field.name: field for field in fields(config)}
    for name, value in vars(config).items():
        if name.startswith("_") or name in honoured or name in _DESCRIPTIVE or name in _PARTS:
            continue
        if name not in declared:
            yield where, config, name
            continue
        field = declared[name]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if _plain(value) != _plain(default):
            raise ValueError(f"{where}{name} is {value!r}; the native engine supports {default!r} alone")


def _check_quantised(where: str, config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{where}{QUANTISED}")


def _plain(value: Any) -> Any:
    """Return a value in its JSON form."""
    return list(value) if isinstance(value, tuple) else value


def _check_read(config: Any, extras: Iterable[tuple[str, Any, str]]) -> None:
    """Refuse undeclared fields that the model's code reads."""
    try:
        with torch.device("meta"):
            model = model_class(config)(config)
    except Exception as error:  # a bad configuration may raise anything
        raise ValueError(f"transformers cannot build this model: {error!r}") from error
    for where, part, name in extras:
        value = getattr(part, name)
        # code reads absent fields with the default None, except this one
        if (value is not None or name == "is_causal") and name in names_read(model, part, config):
            raise ValueError(
                f"{where}{name} is {value!r}: the model's code in transformers reads it, and the native engine "
                "does not honour it; take the field out, or use engine: vllm"
            )


def _check_text(where: str, text: Any, family: type[Family]) -> None:
    heads = text.num_attention_heads
    for kv_heads in {one.num_key_value_heads: None for one in layer_configs(text)}:
        if heads % kv_heads:
            raise ValueError(
                f"{where}num_key_value_heads is {kv_heads}; it must divide num_attention_heads, which is {heads}"
            )
    _check_activations(where, text)
    is_fused, rope = family.decoder == "fused", text.rope_parameters or {}
    rope_types = _ROPE_TYPES if is_fused else _GENERIC_ROPE_TYPES
    for own in [rope] if is_fused or "rope_type" in rope else rope.values():
        if own.get("rope_type") not in rope_types:  # a step mixes sequences of different lengths
            raise ValueError(
                f"{where}rope_parameters.rope_type is {own.get('rope_type')!r}; the native engine runs "
                f"{', '.join(rope_types)}, alike at any length of the context"
            )
    if is_fused:
        _check_fused(where, text, rope)


def _check_fused(where: str, text: Any, rope: Any) -> None:
    """Raise for heads and layers that the fused decoder does not run."""
    if (factor := rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(
            f"{where}rope_parameters.partial_rotary_factor is {factor}; the native engine rotates whole heads"
        )
    shared = text.hidden_size // text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or shared
    sections = rope.get("mrope_section") or ()
    if text.model_type in _MROPE_MODELS and sum(sections) != head_dim // 2:
        raise ValueError(
            f"{where}rope_parameters.mrope_section is {list(sections)}; its sum must be half of a head's width, "
            f"{head_dim // 2}"
        )
    if text.model_type in _NARROW_HEADS and head_dim != shared:
        raise ValueError(f"{where}head_dim is {head_dim}; this model's heads share hidden_size: {shared} for each")
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"{where}layer_types has {layer_type!r}; the native engine runs full_attention, and "
                "sliding_attention inside its window"
            )
        if layer_type == "sliding_attention" and not getattr(text, "sliding_window", None):
            raise ValueError(f"{where}layer_types has 'sliding_attention', which needs a sliding_window")


def _check_vision(vision: Any) -> None:
    where = "vision_config."
    _check_activations(where, vision)
    for name in ("in_channels", "num_channels"):
        if (channels := getattr(vision, name, 3)) != 3:
            raise ValueError(f"{where}{name} is {channels}; pictures have 3 channels, red, green and blue")
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    if len(set(levels)) < len(levels) or not all(0 <= level < vision.depth for level in levels):
        raise ValueError(
            f"{where}deepstack_visual_indexes is {list(levels)}; it must name different ones of the "
            f"{vision.depth} layers"
        )


def _check_activations(where: str, config: Any) -> None:
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        if (name := getattr(config, field, None)) is not None and name not in ACT2FN:
            raise ValueError(f"{where}{field} is {name!r}; transformers has {', '.join(ACT2FN)}")


#: Names called by every language model.
_SHARED_MODULES = (masking_utils, cache_utils, modeling_rope_utils)


def names_read(model: nn.Module, part: Any, whole: Any) -> frozenset[str]:
    """Return the configuration fields read by the classes and modules that run a part of the model."""
    inner = [m for m in model.modules() if type(getattr(m, "config", None)) is not type(whole)]
    roots = [m for m in inner if type(getattr(m, "config", None)) is type(part)]
    if part is whole:
        owned = {id(child) for m in inner if hasattr(m, "config") for child in m.modules()}
        classes = {type(m) for m in model.modules() if id(m) not in owned}
    else:
        classes = {type(child) for root in roots for child in root.modules()}
    names: set[str] = set()
    for cls in classes:
        for base in cls.__mro__:
            if base.__module__.startswith("transformers.models."):
                reads = _reads(base.__module__)
                names |= reads[base.__name__] | reads[_FUNCTIONS]
    if part is whole.get_text_config():
        for module in _SHARED_MODULES:
            names.update(*_reads(module.__name__).values())
    return frozenset(names)


#: Key of a module's code outside classes.
_FUNCTIONS, _REST = "functions", "rest"


@lru_cache(maxsize=64)
def _reads(module: str) -> dict[str, frozenset[str]]:
    """Return the configuration fields that a module reads, by class, and in its functions.

    Finds ``x`` in ``config.x``, ``self.config.x`` and ``getattr(config, "x", ...)``.
    """
    found = defaultdict[str, set[str]](set, {_FUNCTIONS: set()})
    for part in _DEFINITION.split(inspect.getsource(sys.modules[module])):
        name = re.match(r"class (\w+)", part)
        key = name[1] if name else _FUNCTIONS if part.startswith("def ") else _REST
        found[key].update(_READ.findall(part))
    return {key: frozenset(names) for key, names in found.items()}


_DEFINITION = re.compile(r"^(?=class |def |@|\w+ = )", re.MULTILINE)
_READ = re.compile(r"\b(?:layer_|decoder_|effective_)?config(?:\.|, *[\"'])(\w+)")
