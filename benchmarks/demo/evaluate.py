"""Measures the demo model on fresh scenes: `python -m benchmarks.demo.evaluate [--weights DIR]`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.demo.held_out import HELD_OUT_WORDINGS
from benchmarks.demo.questions import IMAGE_KINDS, Question, image_question_of
from benchmarks.demo.scenes import draw_scene
from benchmarks.demo.text_questions import TEXT_KINDS, text_question_of
from benchmarks.demo.tokenizer import IMAGE
from benchmarks.demo.wordings import IMAGE_WORDINGS
from epd_serve.demo import weights_dir

SEED = 987_654_321  # training draws from small seeds
SIZES = (
    (224, 224),
    (320, 240),
    (240, 320),
    (512, 512),
    (640, 480),
    (400, 225),
    (300, 200),
    (300, 300),
    (1024, 768),
)
BATCH = 40


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question to put to the model, with its picture if it has one."""

    question: Question
    image: Image.Image | None


class DemoModel:
    """The model behind its tokenizer and its image processor, loaded as any checkpoint is.

    `AutoProcessor` is not used because Qwen3-VL's needs torchvision, for video alone.
    """

    def __init__(self, weights: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(weights, padding_side="left")
        self._image_processor = AutoImageProcessor.from_pretrained(weights)
        self._model = AutoModelForImageTextToText.from_pretrained(weights, dtype=torch.bfloat16).eval()

    def answer(self, items: Sequence[Item]) -> list[str]:
        """The model's greedy answers."""
        images = [item.image for item in items if item.image is not None]
        vision = self._image_processor(images, return_tensors="pt") if images else {}
        counts = iter(vision["image_grid_thw"].prod(-1) // self._image_processor.merge_size**2 if images else ())
        prompts = []
        for item in items:
            prompt = self._prompt(item)
            prompts.append(prompt.replace(IMAGE, IMAGE * int(next(counts))) if item.image is not None else prompt)
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True)
        if images:
            vision["mm_token_type_ids"] = (inputs["input_ids"] == self._model.config.image_token_id).int()
        with torch.inference_mode():
            output = self._model.generate(**inputs, **vision, max_new_tokens=28, do_sample=False)
        answers = self._tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    def _prompt(self, item: Item) -> str:
        content = [{"type": "text", "text": item.question.text}]
        if item.image is not None:
            content.insert(0, {"type": "image"})
        messages = [{"role": "user", "content": content}]
        prompt: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return prompt


def image_items(rng: random.Random, per_kind: int, *, held_out: bool) -> Iterable[Item]:
    """Yield ``per_kind`` questions of every kind, each about a scene of its own."""
    wordings = HELD_OUT_WORDINGS if held_out else IMAGE_WORDINGS
    for kind in IMAGE_KINDS:
        found = 0
        while found < per_kind:
            scene = draw_scene(rng, *rng.choice(SIZES))
            question = image_question_of(kind, scene, rng, wordings)
            if question is not None:
                found += 1
                yield Item(question=question, image=scene.image)


def text_items(rng: random.Random, per_kind: int, *, held_out: bool) -> Iterable[Item]:
    """Yield ``per_kind`` questions of every kind that needs no picture."""
    for kind in TEXT_KINDS:
        for _ in range(per_kind):
            yield Item(question=text_question_of(kind, rng, held_out=held_out), image=None)


def report(title: str, model: DemoModel, items: Sequence[Item], show_wrong: int) -> None:
    """Ask everything and print the share of exact answers by kind."""
    answers: list[str] = []
    for start in range(0, len(items), BATCH):
        answers += model.answer(items[start : start + BATCH])
    results = list(zip(items, answers, strict=True))
    print(f"\n{title}\n{'question type':16}{'right':>8}{'asked':>8}{'share':>9}")
    for kind in dict.fromkeys(item.question.kind for item in items):
        _print_share(
            kind, [item.question.answer == answer for item, answer in results if item.question.kind == kind]
        )
    _print_share("all", [item.question.answer == answer for item, answer in results])
    wrong = [(item.question, answer) for item, answer in results if item.question.answer != answer]
    for question, answer in wrong[:show_wrong]:
        print(f"  {question.kind}: {question.text!r} -> {answer!r}, not {question.answer!r}")


def _print_share(name: str, right: Sequence[bool]) -> None:
    print(f"{name:16}{sum(right):8}{len(right):8}{sum(right) / len(right):9.1%}", flush=True)


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=weights_dir())
    parser.add_argument("--num-images", type=int, default=1300, help="pictures for each of the two image tables")
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong answers to print below each table")
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    model = DemoModel(args.weights)
    per_kind = max(1, args.num_images // len(IMAGE_KINDS))
    for held_out in (False, True):
        rng = random.Random(SEED + held_out)
        words = "wordings never seen in training" if held_out else "wordings seen in training"
        images = list(image_items(rng, per_kind, held_out=held_out))
        report(f"Questions about a picture, {words}", model, images, args.show_wrong)
        texts = list(text_items(rng, per_kind, held_out=held_out))
        report(f"Questions without a picture, {words}", model, texts, args.show_wrong)


if __name__ == "__main__":
    main()
