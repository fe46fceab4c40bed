"""The frames of one video on several encoders: the tokens of one encoder, when one of them dies as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from clips import Clip, clip
from fleet import deployed, figures
from identity import Fleet, Question, generated
from reference import Reference

from epd_serve.routing import encoders

#: test_without_weights does it each time with a model that computes nothing.
pytestmark = pytest.mark.slow
KINDS = ["qwen3_vl", "qwen2_5_vl", "gemma4"]


@pytest.fixture(autouse=True)
def _split_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Videos of tests are so short that it would not pay."""
    monkeypatch.setattr(encoders, "_CALL_S", float("-inf"))
    yield


async def num_encoded(urls: dict[str, str]) -> dict[str, float]:
    return {name: (await figures(url))["tower_images_total"] for name, url in urls.items() if name[0] == "e"}


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_equal_generate_over_two_and_three_encoders(kind: str, tmp_path: Path) -> None:
    """Whole and streamed, beside a text; each segment is encoded once. Gemma's file takes two frames: the third
    encoder has none, as what the gateway knows of it is about."""
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    reference = Reference(path)
    questions = [Question("What happens?", videos=(Clip(clip(seed, 24, (96, 64), fps=6)),)) for seed in (1, 2)]
    text = Question("Say apple")
    answers = {one: generated(reference, one) for one in (text, *questions)}
    del reference
    async with deployed("3E-P-D", path, instances={"max_num_batched_tokens": 200}) as deployment:
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        for count, question in zip((2, 3), questions, strict=True):
            names = [f"e{number}" for number in range(count)]
            before = await num_encoded(urls)
            fleet = Fleet(deployment, {one: answers[one] for one in (text, question)}, ignore_eos=True)
            await fleet.check_tokens([*names, "p0", "d0"])
            after = await num_encoded(urls)
            shares = [after[name] - before[name] for name in after]
            assert sum(shares) == (min(count, 2) if kind == "gemma4" else count)
            assert sum(share > 0 for share in shares) >= 2  # where one is slow, another may take two
