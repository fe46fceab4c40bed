"""The answers of transformers' own ``generate``: the oracle of identity tests. Shares no code with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)


class Reference:
    """The whole model in one piece, float32, greedy."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        config: Any = AutoConfig.from_pretrained(path)
        self.takes_images = hasattr(config, "vision_config")
        auto: Any = AutoModelForImageTextToText if self.takes_images else AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(path, dtype=torch.float32).eval()
        self._placeholder = None
        if self.takes_images:
            self._images: Any = AutoImageProcessor.from_pretrained(path)
            self._placeholder = getattr(config, "image_token_id", None) or config.image_token_index

    def generate(self, text: str, images: Sequence[Image.Image] = (), *, max_tokens: int) -> list[int]:
        """Token ids of the answer to one user message with its images before the text; stops at EOS."""
        parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        content: Any = parts if images else text
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = []
        inputs: dict[str, Any] = {}
        counts = iter(())
        if images:
            inputs = dict(self._images(images=list(images), return_tensors="pt"))
            if "image_grid_thw" in inputs:
                counts = iter((inputs["image_grid_thw"].prod(-1) // self._images.merge_size**2).tolist())
            else:
                counts = iter([16] * len(images))
        for token in self.tokenizer.encode(prompt, add_special_tokens=False):
            ids += [token] * next(counts) if token == self._placeholder else [token]
        input_ids = torch.tensor([ids])
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (input_ids == self._placeholder).int()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                **inputs,
            )
        answer: list[int] = output[0, len(ids) :].tolist()
        return answer
