"""A drift is found soon, by its name, and chance is none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.autoscale.drift import Drift, DriftDetector, Observed
from epd_serve.config.elastic import DriftConfig

OPTIONS = DriftConfig(num_requests=100)


def workload(
    seed: int, count: int, *, prompt: float = 300, output: float = 60, images: float = 0.5, rate: float = 4.0
) -> list[Observed]:
    draw, at_s = random.Random(seed), 0.0
    every: list[Observed] = []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        every.append(
            Observed(
                at_s=at_s,
                num_prompt_tokens=round(draw.lognormvariate(0, 0.7) * prompt) + 1,
                num_output_tokens=round(draw.expovariate(1 / output)) + 1,
                num_images=int(draw.random() < images),
            )
        )
    return every


def drifts_of(*parts: list[Observed], detector: DriftDetector | None = None) -> list[Drift]:
    detector = detector or DriftDetector(OPTIONS)
    found: list[Drift] = []
    end_s = 0.0
    for part in parts:
        for one in part:
            found += detector.observe(replace(one, at_s=one.at_s + end_s))
        end_s += part[-1].at_s if part else 0.0
    return found


@settings(max_examples=8, deadline=None)
@given(st.integers(), st.floats(10, 3000), st.floats(5, 500), st.floats(0, 1), st.floats(0.1, 50))
def test_chance_is_no_drift(seed: int, prompt: float, output: float, images: float, rate: float) -> None:
    assert drifts_of(workload(seed, 1000, prompt=prompt, output=output, images=images, rate=rate)) == []


@pytest.mark.parametrize(
    ("figure", "change"),
    [
        ("tokens of a prompt", {"prompt": 900.0}),
        ("tokens of an answer", {"output": 600.0}),
        ("share of requests with images", {"images": 0.05}),
        ("requests a second", {"rate": 12.0}),
    ],
)
def test_each_figure_is_found_within_two_windows_by_its_name(figure: str, change: dict[str, float]) -> None:
    before, after = workload(1, 300), workload(2, 200, **change)
    found = drifts_of(before, after)
    assert found[0].figure == figure
    assert found[0].at_s > before[-1].at_s
    assert figure in str(found[0])
    assert {one.figure for one in found} == {figure}


def test_after_a_drift_the_new_workload_is_the_known_one() -> None:
    detector = DriftDetector(OPTIONS)
    assert drifts_of(workload(1, 300), workload(2, 600, output=600.0), detector=detector)
    assert len(detector._recent) == 100
    fresh = DriftDetector(OPTIONS)
    parts = [workload(1, 300), workload(2, 1500, output=600.0)]
    times = [one.at_s for one in drifts_of(*parts, detector=fresh)]
    assert all(at_s < parts[0][-1].at_s + 500 / 4.0 for at_s in times)


def test_bursts_are_no_other_rate() -> None:
    def bursts(seed: int) -> list[Observed]:
        every = workload(seed, 900)
        return [replace(one, at_s=30.0 * (number // 30) + 0.01 * number) for number, one in enumerate(every)]

    assert [one for one in drifts_of(bursts(3)) if one.figure == "requests a second"] == []


@pytest.mark.parametrize("wrong", [{"num_requests": 5}, {"factor": 1.0}])
def test_options_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        DriftConfig(**wrong)
