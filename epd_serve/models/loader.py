"""Partial loading: an instance loads only the weights of its stages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoVideoProcessor, PreTrainedModel

from epd_serve.models.checkpoint_config import model_class, read_config
from epd_serve.models.families import TEXT, family_of
from epd_serve.models.family import Family, require
from epd_serve.weight_files import read_header

_HOST = torch.device("cpu")
#: Names in the header of a safetensors file.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Files that determine a tower's inputs and features.
_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 1 << 16


class ModelPart(Enum):
    """A part of a model: encode instances hold the tower, prefill and decode instances the language model."""

    TOWER = "tower"
    LANGUAGE_MODEL = "language_model"


def load_family(path: Path) -> Family:
    """Return the family of the model in ``path``. Raises ValueError if the engine cannot run it correctly."""
    config = read_config(path)
    kind = family_of(config)
    try:
        takes_images = "image" in kind.modalities
        processor = AutoImageProcessor.from_pretrained(path, local_files_only=True) if takes_images else None
        family = kind(config, processor)
        if "video" in kind.modalities and _shows_videos(path):
            family.video = family.read_video(AutoVideoProcessor.from_pretrained(path, local_files_only=True))
            family.token_ids["video"] = config.video_token_id
        if "audio" in kind.modalities and config.audio_config is not None:
            extractor = AutoFeatureExtractor.from_pretrained(path, local_files_only=True)
            family.audio = family.audio_processor(extractor)
            family.token_ids["audio"] = config.audio_token_id
        file, fields = path / "processor_config.json", family.processor_fields
        content = json.loads(file.read_text(encoding="utf-8")) if fields and file.exists() else {}
        for name, expected in fields.items():  # they determine the tokens of an item
            require(f"{name} of {file.name}", content.get(name, expected), expected)
        family.check()
    except (ValueError, OSError) as error:  # OSError: a missing file
        raise ValueError(f"{path}: {error}") from error
    return family


def _shows_videos(path: Path) -> bool:
    """Return whether a chat template mentions videos: models without video support do not."""
    templates = [file.read_text() for file in path.glob("**/*.jinja")]
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (path / name).exists():
            templates.append(str(json.loads((path / name).read_text()).get("chat_template")))
    return any("video" in template for template in templates)


@dataclass(frozen=True, slots=True)
class _StoredWeight:
    """A weight in a file, in the form that transformers loads; read straight onto ``home`` when it is taken.

    ``pages``: the whole file, on a CPU: a mapping for each weight would keep a file descriptor for each.
    """

    file: Path
    offset: int
    entry: dict[str, Any]
    home: torch.device
    pages: NDArray[np.uint8] | None

    def __getitem__(self, _: Any) -> _StoredWeight:
        return self

    def to(self, device: Any, dtype: torch.dtype) -> Tensor:
        """Return the values: on a CPU pages of the file, mapped while the tensor lives, if dtypes agree."""
        start, end = (self.offset + place for place in self.entry["data_offsets"])
        if (stored := _DTYPES.get(self.entry["dtype"])) is None:
            known = ", ".join(_DTYPES)
            raise ValueError(f"{self.file}: a weight has the dtype {self.entry['dtype']}; supported are {known}")
        if start == end:
            return torch.empty(self.entry["shape"], dtype=dtype, device=self.home)
        if self.pages is not None and stored == dtype:
            content = self.pages[start:end]
        else:
            content = np.memmap(self.file, np.uint8, "c", start, (end - start,))
        values = torch.from_numpy(content).view(stored).view(self.entry["shape"])
        return values.to(dtype).to(self.home)


def _stored_weights(path: Path, home: torch.device) -> dict[str, _StoredWeight]:
    """Return the weights of a checkpoint by name. Raises ValueError for missing or damaged safetensors files."""
    index = path / "model.safetensors.index.json"
    files = [path / "model.safetensors"]
    if not files[0].is_file() and index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({path / str(name) for name in weight_map.values()})
    stored: dict[str, _StoredWeight] = {}
    for file in files:
        offset, tensors = read_header(file)
        pages = np.memmap(file, np.uint8, "c") if home.type == "cpu" else None
        stored |= {name: _StoredWeight(file, offset, entry, home, pages) for name, entry in tensors.items()}
    return stored


def load_part(path: Path, part: ModelPart, dtype: torch.dtype, device: torch.device = _HOST) -> nn.Module:
    """Return the tower with its projector, or the language model with its head, on a device.

    The other part's modules are dropped and its weights are not read. On a CPU, weights of that dtype are pages of
    the checkpoint's files. Raises ValueError for an unsupported configuration, and for missing or unexpected
    weights in the checkpoint.
    """
    config = read_config(path)
    assert part is ModelPart.LANGUAGE_MODEL or config.model_type not in TEXT, "a text-only model lacks a tower"
    model, info = _partial_class(model_class(config), part).from_pretrained(
        None,
        config=config,
        state_dict=_stored_weights(path, device),
        dtype=dtype,
        output_loading_info=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # reported below
    )
    _check_weights(path, info)
    loaded: nn.Module = model.eval().requires_grad_(False).to(device)
    return loaded


def _check_weights(path: Path, info: dict[str, Any]) -> None:
    """Raise ValueError unless the checkpoint has the model's weights and no others."""
    if info["missing_keys"]:
        raise ValueError(f"{path}: the checkpoint lacks {_some(info['missing_keys'])}")
    if info["unexpected_keys"]:
        raise ValueError(
            f"{path}: the checkpoint has {_some(info['unexpected_keys'])}, which a model of its config.json does "
            "not have; take them out, or use the config.json that they were saved with"
        )
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise ValueError(
            f"{path}: the weight {name} has the shape {list(found)}; config.json requires {list(expected)}"
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    count = "a weight" if len(ordered) == 1 else f"{len(ordered)} weights, among them"
    return f"{count} {', '.join(ordered[:5])}"


def attend_by(model: nn.Module, name: str) -> None:
    """Make every attention layer of a transformers model call the attention function of that name.

    Layers with built-in attention, such as Gemma 4's audio tower, are unaffected.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name
    for module in model.modules():  # configurations propagate to the parts
        if isinstance(module, PreTrainedModel) and not (
            module._supports_attention_backend or module._supports_sdpa
        ):
            module.config._attn_implementation = "eager"


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _partial_class(base: Any, part: ModelPart) -> Any:
    """Return a subclass of a transformers model whose ``__init__`` drops other parts."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        inner = self.model
        if part is ModelPart.TOWER:
            modules = dict(self.named_modules())
            others = ("lm_head", *family_of(config).other_parts)
            dropped = ["model.language_model", *(name for name in others if name in modules)]
            self.all_tied_weights_keys = {}
        elif config.model_type in TEXT:
            dropped = []
        else:  # LLaVA-NeXT has a weight outside its modules
            owned = (*inner.named_children(), *inner.named_parameters(recurse=False))
            dropped = [f"model.{name}" for name, _ in owned if name != "language_model"]
        for name in dropped:
            parent, _, child = name.rpartition(".")
            owner = self.get_submodule(parent)
            is_weight = child in owner._parameters
            delattr(owner, child)
            # transformers initialises all weights, but must skip missing modules
            setattr(owner, child, torch.empty(0) if is_weight else None)
        unread = {*dropped, *family_of(config).other_parts}
        self._keys_to_ignore_on_load_unexpected |= {f"^{re.escape(name)}([.]|$)" for name in unread}

    members: dict[str, Any] = {
        "__init__": init,
        # transformers skips the renaming of checkpoint keys for classes of foreign modules
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    if part is ModelPart.TOWER:
        members["_tied_weights_keys"] = {}
    return type(base.__name__, (base,), members)


def media_fingerprint(path: Path, dtype: str) -> str:
    """Return a hex hash of a feature's inputs other than the media: config, processor, sampled weights, dtype."""
    hasher = blake3(f"epd-serve feature 2 {dtype}".encode())
    for name in _FILES:
        file = path / name
        hasher.update(name.encode() + (file.read_bytes() if file.exists() else b"-"))
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        hasher.update(f"{file.name} {size}".encode())
        step = max(size // _SAMPLES_PER_FILE, _SAMPLE_BYTES)
        with file.open("rb") as stream:
            for offset in range(0, size, step):
                stream.seek(offset)
                hasher.update(stream.read(_SAMPLE_BYTES))
    return hasher.hexdigest()
