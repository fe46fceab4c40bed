"""transformers' ``generate`` as a benchmark's worker: one like ``engine_native``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from benchmarks.engine_native import arguments_of_worker, image_inputs, random_prompts, serve, timed


def main() -> None:
    arguments = arguments_of_worker(__doc__)
    model: Any = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(batch: int, prompt: int, tokens: int) -> dict[str, Any]:
        ids = torch.tensor(random_prompts(batch, prompt, arguments.vocabulary))
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return {}

    @torch.inference_mode()
    def encode(batch: int, grid: list[int], width: int) -> dict[str, Any]:
        inputs = image_inputs(batch, grid, width)
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
        return timed(lambda: sum(map(len, model.get_image_features(**inputs, return_dict=True).pooler_output)))

    serve({"generate": generate, "encode": encode})


if __name__ == "__main__":
    main()
