"""The answers of transformers' own ``generate``: the oracle of identity tests. Shares no code with the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from clips import Clip
from PIL import Image
from processors import processor_of, videos_of
from sounds import Sound
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer


class Reference:
    """The whole model in one piece, float32, greedy.

    Attributes:
        prompt: the ids of the prompt that was answered last.
    """

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path)
        self.takes_images = hasattr(config, "vision_config")
        self.takes_sounds = hasattr(config, "audio_config") and "audio" in self.tokenizer.chat_template
        is_multimodal = self.takes_images or self.takes_sounds
        auto: Any = AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(path, dtype=torch.float32).eval()
        self._processor = processor_of(path) if is_multimodal else None
        self.prompt: list[int] = []

    def takes(self, videos: Sequence[Clip], sounds: Sequence[Sound]) -> bool:
        """Whether its answer is one that ours can be.

        Qwen3-ASR's processor takes one sound. Qwen3-Omni's makes fractions of positions at some rates, and its
        extractor another last frame of a sound where a longer one stands beside it.
        """
        name = type(self._processor).__name__
        if name == "Qwen3OmniMoeProcessor":
            lengths = {len(sound.samples()) for sound in sounds}
            return len(lengths) < 2 and not any(clip.fps for clip in videos)
        # and of these videos a rate cannot be asked for
        if name in ("Gemma4Processor", "Gemma4UnifiedProcessor"):
            return not any(clip.fps for clip in videos)
        return name != "Qwen3ASRProcessor" or len(sounds) < 2

    def generate(
        self,
        text: str,
        images: Sequence[Image.Image] = (),
        videos: Sequence[Clip] = (),
        sounds: Sequence[Sound] = (),
        *,
        bounds: Mapping[str, int] | None = None,
        max_tokens: int,
        **template: Any,
    ) -> list[int]:
        """Token ids of the answer to one user message with its images, its videos and then its sounds before the
        text; stops at EOS. ``bounds``: ``min_pixels`` and ``max_pixels`` of images. ``template``: the chat
        template's variables."""
        parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
        parts += [{"type": "audio"}] * len(sounds)
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, **template
        )
        has_processor = self._processor is not None and (self.takes_images or sounds)
        read = self._processor if has_processor else self.tokenizer
        media: dict[str, Any] = {"images": list(images)} if images else {}
        if bounds:
            edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
            asked = {edges[name]: pixels for name, pixels in bounds.items()}
            media["size"] = {**dict(read.image_processor.size), **asked}
        if videos:
            media |= videos_of(read, videos)
        if sounds:
            media["audio"] = [sound.samples() for sound in sounds]
        inputs = read(text=[prompt], **media, return_tensors="pt", add_special_tokens=False)
        inputs.pop("video_metadata", None)
        with torch.inference_mode():
            output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        self.prompt = inputs["input_ids"][0].tolist()
        answer: list[int] = output[0, len(self.prompt) :].tolist()
        return answer


@cache
def reference_of(path: Path) -> Reference:
    """The reference of a model that several tests of a process share."""
    return Reference(path)


def logprobs_of(path: Path) -> Callable[[list[int]], torch.Tensor]:
    """A function from a prompt's tokens to the log-probabilities [tokens, vocab] behind each."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)

    return logprobs
