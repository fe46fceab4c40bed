"""transformers' own processors without torchvision, which only their videos need."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from plain_torchvision import TORCHVISION_ALONE, image_processor_of
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.processing_utils import ProcessorMixin


def processor_of(path: Path) -> Any:
    """The processor of a checkpoint, for text, pictures and sounds."""
    file = path / "processor_config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    name = content.pop("processor_class", None)
    config = AutoConfig.from_pretrained(path)
    name = name or PROCESSOR_MAPPING_NAMES[config.model_type]
    # Pixtral's imports a function of the image processor for torchvision, which the other one has as well
    replaced = {"transformers.models.pixtral.image_processing_pixtral": image_processing_pil_pixtral}
    with mock.patch.dict(sys.modules, replaced):
        package = next(one for one, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name and one in _PACKAGES)
        module = importlib.import_module(f"transformers.models.{package}.processing_{package}")
    kind = getattr(module, name)
    parts = {"tokenizer": AutoTokenizer.from_pretrained(path)}
    if "image_processor" in kind.get_attributes():
        if config.model_type in TORCHVISION_ALONE:
            parts["image_processor"] = image_processor_of(path, config.model_type)
        else:
            parts["image_processor"] = AutoImageProcessor.from_pretrained(path, backend="pil")
    if "feature_extractor" in kind.get_attributes():
        parts["feature_extractor"] = AutoFeatureExtractor.from_pretrained(path)
    if "video_processor" in kind.get_attributes():
        parts["video_processor"] = None
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"):
        return kind(**parts, **content)


_PACKAGES = {
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "qwen3_asr",
    "qwen2_audio",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "internvl",
    "pixtral",
    "llava_next",
    "llava_onevision",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "glm4v",
    "glm4v_moe",
    "glm46v",
}
