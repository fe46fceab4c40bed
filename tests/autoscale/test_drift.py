"""A drift is found soon, by its name, and chance is none."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.autoscale.drift import WINDOW, DriftDetector, ServedRequest


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def load(
    seed: int,
    count: int,
    *,
    begin_s: float = 0.0,
    prompt: float = 300,
    answer: float = 60,
    images: float = 0.5,
    rate: float = 4.0,
) -> list[ServedRequest]:
    draw, at_s = random.Random(seed), begin_s
    requests: list[ServedRequest] = []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        requests.append(
            ServedRequest(
                time=at(at_s),
                status=200,
                images=int(draw.random() < images),
                prompt_tokens=round(draw.lognormvariate(0, 0.7) * prompt) + 1,
                completion_tokens=round(draw.expovariate(1 / answer)) + 1,
                duration_ms=0.0,
            )
        )
    return requests


def drifts_of(requests: list[ServedRequest]) -> list[tuple[int, str]]:
    """Number of the request that showed a drift, and its sentence."""
    detector = DriftDetector()
    return [(number, drift) for number, one in enumerate(requests) for drift in detector.observe(one)]


@settings(max_examples=8, deadline=None)
@given(st.integers(), st.floats(10, 3000), st.floats(5, 500), st.floats(0, 1), st.floats(0.1, 50))
def test_chance_is_not_drift(seed: int, prompt: float, answer: float, images: float, rate: float) -> None:
    assert drifts_of(load(seed, 1000, prompt=prompt, answer=answer, images=images, rate=rate)) == []


@pytest.mark.parametrize(
    ("figure", "change"),
    [
        ("prompt tokens", {"prompt": 900.0}),
        ("answer tokens", {"answer": 600.0}),
        ("images per request", {"images": 0.05}),
        ("seconds between requests", {"rate": 12.0}),
    ],
)
def test_each_figure_is_found_soon_and_then_known(figure: str, change: dict[str, float]) -> None:
    before, later = load(1, 500), load(2, 1000, begin_s=200.0, **change)
    found = drifts_of([*before, *later])
    assert {drift.partition(" went from ")[0] for _, drift in found} == {figure}
    assert 500 < found[0][0] <= 500 + WINDOW and found[-1][0] <= 500 + 3 * WINDOW


def test_bursts_are_not_another_rate() -> None:
    every = [
        msgspec.structs.replace(one, time=at(30.0 * (number // 30) + 0.01 * number))
        for number, one in enumerate(load(3, 1200))
    ]
    assert drifts_of(every) == []
