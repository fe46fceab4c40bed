"""transformers' own processors without torchvision, which only their videos need."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from plain_torchvision import TORCHVISION_ALONE, image_processor_of
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor
from transformers.processing_utils import ProcessorMixin


class PlainVoxtralProcessor:
    """VoxtralProcessor with a tokenizer of transformers: its own takes mistral-common's alone."""

    audio_token = "[AUDIO]"

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.feature_extractor = AutoFeatureExtractor.from_pretrained(path)

    def __call__(self, text: list[str], audio: Any = (), **options: Any) -> BatchFeature:
        extractor = self.feature_extractor
        block, num_frames = extractor.n_samples, extractor.nb_max_frames
        first, *rest = text[0].split(self.audio_token)
        for sound, words in zip(audio, rest, strict=True):
            first += self.audio_token * (num_frames // 8 * -(-len(sound) // block)) + words
        ids = self.tokenizer([first], **options)
        features = VoxtralProcessor._retrieve_input_features(
            self,
            audio,
            num_frames,
            sampling_rate=16000,
            padding=True,
            truncation=False,
            pad_to_multiple_of=block,
            return_tensors="pt",
        )
        return BatchFeature({**ids, "input_features": features})


class WholePaliGemmaProcessor:
    """PaliGemmaProcessor for texts that have the beginning and the end which it adds, and for text alone."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.tokenizer = processor.tokenizer

    def whole(self, text: str) -> str:
        """A text with that beginning and end."""
        pictures, last, words = text.rpartition("<image>")
        return f"{pictures}{last}{self.tokenizer.bos_token}{words}\n"

    def __call__(self, text: list[str], images: Any = (), **options: Any) -> BatchFeature:
        if not images:
            return self.tokenizer(text, return_token_type_ids=False, **options)
        (given,) = text
        bare = given.replace(self.tokenizer.bos_token, "").removesuffix("\n")
        assert self.whole(bare) == given
        output = self._processor(text=[bare], images=images, **options)
        output.pop("labels")
        return output


def processor_of(path: Path) -> Any:
    """The processor of a checkpoint, for text, pictures and sounds."""
    file = path / "processor_config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    name = content.pop("processor_class", None)
    config = AutoConfig.from_pretrained(path)
    if config.model_type == "voxtral":
        return PlainVoxtralProcessor(path)
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
        # MiniCPM-V's asks how it cuts frames
        cut = SimpleNamespace(slice_mode=True, downsample_mode="16x")
        parts["video_processor"] = cut if config.model_type == "minicpmv4_6" else None
    with (
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
        mock.patch.object(module, "num2words", str, create=True),  # SmolVLM's, of frames
    ):
        processor = kind(**parts, **content)
        return WholePaliGemmaProcessor(processor) if config.model_type == "paligemma" else processor


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
    "idefics3",
    "smolvlm",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "paligemma",
    "minicpmv4_6",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "aya_vision",
    "llama4",
    "lfm2_vl",
}
