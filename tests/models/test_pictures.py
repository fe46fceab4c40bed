"""Pictures of every family: their tokens and pixels by size alone, their features one by one and joined."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_bench import BLOCK_SIZE, EngineBench
from pictures import noise
from processors import processor_of
from reference import reference_of
from torch import Tensor
from transformers import AutoModelForMultimodalLM

from device.registry import get_device
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.chat_template import MediaLiterals
from epd_serve.instance.text.prompt import MediaLayouts
from epd_serve.instance.text.tokenizer import MARK
from epd_serve.models.families.internvl import InternVL
from epd_serve.models.family import Family, Size, picture
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.sched.schedule import Budget


@pytest.fixture(scope="module", params=tiny_models.ALL_KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param)


def _sizes(count: int) -> list[Size]:
    """Sizes of all proportions, evenly over their logarithm."""
    pick = random.Random(0)
    return [(round(8 * 60 ** pick.random()), round(8 * 60 ** pick.random())) for _ in range(count)]


def _is_taken(family: Family, size: Size) -> bool:
    try:
        family.parts(size)
    except InvalidRequest:
        return False
    return True


def test_expanded_ids_are_the_processor_s(path: Path) -> None:
    processor, family = processor_of(path), load_family(path)
    layouts = MediaLayouts(family, processor.tokenizer)
    token = processor.tokenizer.convert_ids_to_tokens(family.token_ids["image"])
    for first, second in zip(_sizes(20), reversed(_sizes(20)), strict=True):
        sizes = [size for size in (first, second) if _is_taken(family, size)]
        text = "What is " + " or\n".join(token for _ in sizes) + "?"
        expected = processor(
            text=[text], images=[noise(1, size) for size in sizes], return_tensors="pt", add_special_tokens=False
        )
        ids: list[int] = []
        rest = iter(sizes)
        for one in processor.tokenizer.encode(text, add_special_tokens=False):
            ids += layouts.of(picture(next(rest))).ids if one == family.token_ids["image"] else [one]
        assert ids == expected["input_ids"][0].tolist(), sizes


def test_tokens_of_pictures_that_a_user_writes_stay_text(path: Path) -> None:
    family, tokenizer = load_family(path), processor_of(path).tokenizer
    literals = MediaLiterals(tokenizer, family.config, family.tokens)
    ids = MediaLayouts(family, tokenizer).of(picture((200, 150))).ids
    special = [tokenizer.convert_ids_to_tokens(one) for one in set(ids) if one in tokenizer.added_tokens_decoder]
    assert special
    assert all(MARK in literals.marked(f"a {token} b") for token in special)


def test_tokens_and_pixels_follow_from_the_size(path: Path) -> None:
    family = load_family(path)
    tower = Tower(path, torch.float32, get_device("cpu"), family=family)
    assert tower.uses_device_attention
    for size in (*_sizes(8), (1, 1), (1, 3000), (3000, 1), (1999, 7)):
        if not _is_taken(family, size):
            continue
        inputs = family.preprocess(np.array(noise(2, size)))
        frames = getattr(family.config.vision_config, "temporal_patch_size", 1)  # a picture is all of them
        assert family.num_pixels(size) == inputs["pixel_values"].numel() // 3 // frames
        assert len(tower.encode([inputs])[0]) == family.num_image_tokens(size)


def test_other_tokens_than_are_counted_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.make_tiny_model("internvl", tmp_path / "model")
    monkeypatch.setattr(InternVL, "num_tokens", lambda family, item: 3)
    with pytest.raises(ValueError, match=r"tokens of an image of 200x50 pixels, where .* say 3"):
        Tower(path, torch.float32, get_device("cpu"), family=load_family(path))


@pytest.mark.parametrize("num_tokens", [7, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2048))])
def test_chunks_of_any_size_give_the_tokens_of_generate(path: Path, num_tokens: int) -> None:
    """And so does a prefix hit that ends within a picture."""
    pictures = [noise(2, (60, 140)), noise(3, (90, 90))]
    reference, bench = reference_of(path), EngineBench(path, Budget(max_num_tokens=num_tokens, max_num_seqs=8))
    bench.encode(pictures)
    bench.engine.submit(bench.sequence("first", "What is this?", pictures, max_tokens=8))
    bench.engine.submit(bench.sequence("text", "Say apple", [], max_tokens=8))
    answers = bench.collect(2)
    expected = reference.generate("What is this?", pictures, max_tokens=8)
    assert answers["first", 0] == expected
    assert answers["text", 0] == reference.generate("Say apple", max_tokens=8)
    again = bench.sequence("again", "What is this?", pictures, max_tokens=8)
    middle = (again.spans[0].start + again.spans[-1].end) // 2
    again.block_hashes = again.block_hashes[: middle // BLOCK_SIZE]
    bench.engine.submit(again)
    assert bench.collect(1)["again", 0] == expected
    bench.check_idle()
    bench.close()


def _features(path: Path, inputs: dict[str, Any]) -> Tensor:
    """transformers' own features of one picture."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model.get_image_features(**inputs, return_dict=True)
    rows = [part.reshape(-1, part.shape[-1]) for part in output.pooler_output]
    levels = [torch.cat(list(level)) for level in getattr(output, "deepstack_features", None) or ()]
    return torch.cat((torch.cat(rows), *levels), dim=-1)


def test_features_are_those_of_transformers_alone_and_joined(path: Path) -> None:
    """Among them two of one shape, and their neighbours of other shapes."""
    family, tower = load_family(path), Tower(path, torch.float32, get_device("cpu"))
    sizes = [(60, 140), (90, 90), (90, 90), (200, 70), (56, 56), (56, 56)]
    batch = [family.preprocess(np.array(noise(seed, size))) for seed, size in enumerate(sizes)]
    for inputs, feature in zip(batch, tower.encode(batch), strict=True):
        torch.testing.assert_close(feature, _features(path, inputs), rtol=1e-4, atol=1e-4)
