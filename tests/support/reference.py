"""The answers of transformers' own ``generate``: the oracle of identity tests. Shares no code with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from processors import processor_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


class Reference:
    """The whole model in one piece, float32, greedy."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.takes_images = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        auto: Any = AutoModelForImageTextToText if self.takes_images else AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(path, dtype=torch.float32).eval()
        self._processor = processor_of(path) if self.takes_images else None

    def generate(self, text: str, images: Sequence[Image.Image] = (), *, max_tokens: int) -> list[int]:
        """Token ids of the answer to one user message with its images before the text; stops at EOS."""
        parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        content: Any = parts if images else text
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        read = self._processor or self.tokenizer
        pictures = {"images": list(images)} if images else {}
        inputs = read(text=[prompt], **pictures, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        answer: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return answer
