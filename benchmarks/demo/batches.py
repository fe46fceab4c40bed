"""Training batches: one picture and several questions about it share a row, each question blind to the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.demo.architecture import TOKEN_PIXELS
from benchmarks.demo.questions import Question, image_question
from benchmarks.demo.scenes import COLORS, SHAPES, Scene, draw_scene
from benchmarks.demo.text_questions import GREETING, text_question
from benchmarks.demo.tokenizer import IMAGE

IGNORE = -100
IMAGE_ROWS, TEXT_ROWS = 30, 6
ROW_TOKENS = 160
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Be brief.",
    "Answer the question.",
)

# Canvas sizes by the grid (rows, columns of image tokens) that the image processor resizes them to.
CANVASES: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (6, 6): ((192, 192), (224, 224), (256, 256), (300, 300), (384, 384), (128, 128)),
    (5, 7): ((320, 240), (256, 192), (400, 300), (224, 168)),
    (7, 5): ((240, 320), (192, 256), (300, 400), (168, 224)),
    (4, 8): ((320, 180), (400, 225), (360, 180)),
    (8, 4): ((180, 320), (225, 400)),
    (4, 7): ((360, 240), (300, 200), (384, 240)),
    (7, 4): ((240, 360), (200, 300)),
    (5, 6): ((300, 250), (240, 190), (320, 256), (200, 150)),
    (6, 5): ((250, 300), (256, 320)),
}
_GRID_WEIGHTS = (10, 7, 4, 3, 2, 2, 2, 2, 2)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A training step's input; `marks` names what each image token holds: kind, colour, row and column."""

    images: np.ndarray[Any, Any]
    marks: Tensor
    input_ids: Tensor
    targets: Tensor
    positions: Tensor
    mask: Tensor


@dataclass(kw_only=True)
class _Row:
    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)

    def extend(self, ids: list[int], targets: list[int], segment: int, parent: int, start: int) -> int:
        """Append text tokens at consecutive positions from `start`; returns the position after them."""
        self.ids += ids
        self.targets += targets
        self.segments += [segment] * len(ids)
        self.parents += [parent] * len(ids)
        self.positions += [(start + i,) * 3 for i in range(len(ids))]
        return start + len(ids)


class BatchMaker:
    """Draws scenes, asks questions and packs both into tensors."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._image_token = tokenizer.convert_tokens_to_ids(IMAGE)

    def make(self, seed: int, *, with_text: bool) -> Batch:
        """The batch of a seed; without text it is scenes for the vision tower, most of them crowded."""
        rng = random.Random(seed)
        grid = rng.choices(list(CANVASES), _GRID_WEIGHTS)[0]
        crowded = 0.0 if with_text else 0.75
        scenes = [
            draw_scene(rng, *rng.choice(CANVASES[grid]), crowded=rng.random() < crowded) for _ in range(IMAGE_ROWS)
        ]
        rows = []
        if with_text:
            rows = [self._image_row(scene, grid, rng) for scene in scenes]
            rows += [self._text_row(rng) for _ in range(TEXT_ROWS)]
        size = (grid[1] * TOKEN_PIXELS, grid[0] * TOKEN_PIXELS)
        pixels = [np.asarray(scene.image.resize(size, Image.Resampling.BICUBIC)) for scene in scenes]
        marks = torch.from_numpy(np.stack([_marks(scene, grid) for scene in scenes]))
        return Batch(images=np.stack(pixels), marks=marks, **_stack(rows))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _image_row(self, scene: Scene, grid: tuple[int, int], rng: random.Random) -> _Row:
        row = _Row()
        before = self._encode(_opening(rng) + "<|im_start|>user\n<|vision_start|>")
        start = row.extend(before, [IGNORE] * len(before), 0, 0, 0)
        count = grid[0] * grid[1]
        row.extend([self._image_token] * count, [IGNORE] * count, 0, 0, 0)
        row.positions[-count:] = [(start, start + y, start + x) for y in range(grid[0]) for x in range(grid[1])]
        after = self._encode("<|vision_end|>")
        start = row.extend(after, [IGNORE], 0, 0, start + max(grid))
        return self._ask(row, lambda: _about(scene, rng), start, rng)

    def _text_row(self, rng: random.Random) -> _Row:
        row = _Row()
        before = self._encode(_opening(rng) + "<|im_start|>user\n")
        start = row.extend(before, [IGNORE] * len(before), 0, 0, 0)
        return self._ask(row, lambda: text_question(rng), start, rng)

    def _ask(self, row: _Row, draw: Callable[[], Question], start: int, rng: random.Random) -> _Row:
        """Fill the row with questions; now and then one continues the conversation of the one before."""
        segment, parent, end = 1, 0, start
        while True:
            question = draw()
            follows = segment > 1 and parent == 0 and rng.random() < 0.3
            lead = "\n<|im_start|>user\n" if follows else ""
            asked = self._encode(f"{lead}{question.text}<|im_end|>\n<|im_start|>assistant\n")
            answer = self._encode(f"{question.answer}<|im_end|>")
            if len(row.ids) + len(asked) + len(answer) > ROW_TOKENS:
                return row
            parent = segment - 1 if follows else 0
            targets = [IGNORE] * (len(asked) - 1) + answer + [IGNORE]
            end = row.extend(asked + answer, targets, segment, parent, end if follows else start)
            segment += 1


def _about(scene: Scene, rng: random.Random) -> Question:
    return text_question(rng) if rng.random() < 0.04 else image_question(scene, rng)


def _opening(rng: random.Random) -> str:
    """The text before the user's turn: mostly none, sometimes a system prompt or a greeting."""
    chance = rng.random()
    if chance < 0.18:
        return f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n"
    if chance < 0.22:
        return f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{GREETING}<|im_end|>\n"
    return ""


def _marks(scene: Scene, grid: tuple[int, int]) -> np.ndarray[Any, Any]:
    """`[4, tokens]`: kind and colour (0 where no shape has its centre), and the centre's row and column third."""
    marks = np.zeros((4, *grid), np.int64)
    marks[2:] = IGNORE
    for shape in scene.shapes:
        cell = int(shape.y * grid[0]), int(shape.x * grid[1])
        marks[:, *cell] = (
            1 + SHAPES.index(shape.kind),
            1 + list(COLORS).index(shape.color),
            shape.row,
            shape.column,
        )
    return marks.reshape(4, -1)


def _stack(rows: list[_Row]) -> dict[str, Tensor]:
    """Pad the rows and work out what each token may attend to."""
    shape = (len(rows), ROW_TOKENS)
    ids, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE)
    segments, parents = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros((3, *shape), dtype=torch.long)
    for index, row in enumerate(rows):
        used = len(row.ids)
        ids[index, :used] = torch.tensor(row.ids)
        targets[index, :used] = torch.tensor(row.targets)
        segments[index, :used] = torch.tensor(row.segments)
        parents[index, :used] = torch.tensor(row.parents)
        positions[:, index, :used] = torch.tensor(row.positions).T
    key, query = segments[:, None, :], segments[:, :, None]
    allowed = (key == 0) | (key == query) | (key == parents[:, :, None])
    visible = (allowed & torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril())[:, None]
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill_(~visible, -1e9)
    return {"input_ids": ids, "targets": targets, "positions": positions, "mask": mask}
