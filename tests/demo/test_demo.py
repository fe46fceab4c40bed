"""The built-in model and the pictures and questions that it was made from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks.demo.evaluate import DemoModel, image_items, text_items
from benchmarks.demo.questions import IMAGE_KINDS, image_question_of
from benchmarks.demo.scenes import draw_scene
from benchmarks.demo.train import Budget, train
from benchmarks.demo.wordings import IMAGE_WORDINGS
from epd_serve.demo import weights_dir

MEGABYTE = 1_000_000


def test_the_packaged_weights_are_small() -> None:
    assert sum(file.stat().st_size for file in weights_dir().iterdir()) < 8 * MEGABYTE


@pytest.mark.parametrize("held_out", [False, True], ids=["known-wordings", "new-wordings"])
def test_held_out_questions_are_answered(held_out: bool) -> None:
    """A small sample; ``python -m benchmarks.demo.evaluate`` measures each type."""
    rng = random.Random(4711 + held_out)
    items = [*image_items(rng, 8, held_out=held_out), *text_items(rng, 4, held_out=held_out)]
    answers = DemoModel(weights_dir()).answer(items)
    right = [answer == item.question.answer for item, answer in zip(items, answers, strict=True)]
    assert sum(right) / len(right) >= (0.9 if held_out else 0.95)


@given(seed=st.integers(0, 2**32), width=st.integers(60, 600), height=st.integers(60, 600))
def test_scenes_hold_what_they_say(seed: int, width: int, height: int) -> None:
    rng = random.Random(seed)
    scene = draw_scene(rng, width, height)
    assert scene.image.size == (width, height)
    assert 1 <= len(scene.shapes) <= 3
    again = draw_scene(random.Random(seed), width, height)
    assert again.image.tobytes() == scene.image.tobytes()
    for kind in IMAGE_KINDS:
        question = image_question_of(kind, scene, rng, IMAGE_WORDINGS)
        assert question is None or (question.text and question.answer)


@pytest.mark.slow
def test_training_writes_a_model_that_loads(tmp_path: Path) -> None:
    """A few steps of everything: the tower alone, then both parts."""
    train(Budget(cpu=8, wall=20), tmp_path, seed=0, resume=None)
    names = []
    for folder in (tmp_path, weights_dir()):
        with safe_open(folder / "model.safetensors", "pt") as weights:
            names.append(sorted(weights.keys()))
    assert names[0] == names[1]
    [answer] = DemoModel(tmp_path).answer(list(text_items(random.Random(0), 1, held_out=False))[:1])
    assert isinstance(answer, str)
