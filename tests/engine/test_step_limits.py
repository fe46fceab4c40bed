"""Budgets of a real instance: measured before it serves, without a trace in its caches."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import tiny_models
from prompts import completion

from epd_serve.config import InstanceOptions
from epd_serve.config.sections import SLOConfig
from epd_serve.engine import pace
from epd_serve.engine.pace import MEASURE_S, StepLimits, StepTimer, median_s
from epd_serve.engine.step import StepRunner
from epd_serve.instance.instance import Instance
from epd_serve.instance.loading.checkpoint import CheckpointModel
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.step_sizes import StepShape
from epd_serve.types import Role


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen2_5_vl")


#: What the test model's processor leaves of an image of 448 x 448 pixels.
IMAGE_PIXELS = 140 * 140


def options(model: Path, role: str, **changes: Any) -> InstanceOptions:
    defaults: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return InstanceOptions(
        name="i0",
        role=Role.parse(role),
        model=model,
        served_model_name="m",
        dtype="float32",
        image_budget_pixels=4 * IMAGE_PIXELS,
        **(defaults | changes),
    )


@asynccontextmanager
async def started(options: InstanceOptions) -> AsyncIterator[Instance]:
    instance = Instance(options)
    await instance.start()
    try:
        yield instance
    finally:
        await instance.close()


async def asked(instance: Instance, path: str) -> Any:
    return json.loads((await instance.handlers()[path](b"")).body)


async def budgets(instance: Instance) -> dict[str, float]:
    found: dict[str, float] = (await asked(instance, "/info"))["budgets"]
    return found


async def answer(instance: Instance, name: str, length: int) -> bytes:
    request = completion(name, [300 + i % 97 for i in range(length)], max_tokens=6)
    reply = await instance.require_prefiller().prefill(request)
    assert reply.on_close is not None
    reply.on_close()
    return reply.body


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """Steps that were measured."""
    shapes: list[StepShape] = []
    seconds = StepTimer.seconds

    def measure(timer: StepTimer, shape: StepShape, *arguments: Any) -> float:
        shapes.append(shape)
        return seconds(timer, shape, *arguments)

    monkeypatch.setattr(StepTimer, "seconds", measure)
    return shapes


async def test_without_an_slo_nothing_is_measured(model: Path, measured: list[StepShape]) -> None:
    for changes in ({}, {"slo": SLOConfig(ttft_ms=50.0)}):
        async with started(options(model, "PD", **changes)) as instance:
            assert await budgets(instance) == {
                "max_num_batched_tokens": 256,
                "chunk_tokens": 256,
                "max_num_seqs": 8,
                "image_budget_pixels": 4 * IMAGE_PIXELS,
                "feature_cache_bytes": 256 << 20,
            }
    assert measured == []


async def test_budgets_come_from_the_slo_and_answers_stay(
    model: Path, monkeypatch: pytest.MonkeyPatch, measured: list[StepShape]
) -> None:
    async with started(options(model, "EPD", slo=SLOConfig(tpot_ms=10_000.0))) as instance:
        loose = await budgets(instance)
        expected = [await answer(instance, f"a{length}", length) for length in (5, 200)]
        idle = await asked(instance, "/integrity")
        measured.clear()
        await instance.rebuild(Role.parse("PD"))
        await instance.rebuild(Role.parse("EPD"))
        steps = [str(shape) for shape in measured]
        assert len(set(steps)) == len(steps), "a role that it had is measured again"
    assert (loose["max_num_batched_tokens"], loose["max_num_seqs"], loose["limit_ms"]) == (256, 8, 10_000)
    assert loose["image_budget_pixels"] == 4 * IMAGE_PIXELS
    assert set(idle.values()) == {0}, "the profile left something behind"
    monkeypatch.setattr(StepTimer, "seconds", lambda timer, shape: 0.001 * shape.work.num_tokens)
    monkeypatch.setattr(CheckpointModel, "encode_seconds", lambda model, tower, count: 0.1 * count)
    async with started(options(model, "EPD", slo=SLOConfig(tpot_ms=250.0))) as instance:
        assert [await answer(instance, f"a{length}", length) for length in (5, 200)] == expected
        tight = await budgets(instance)
    assert tight["image_budget_pixels"] == 2 * IMAGE_PIXELS
    assert tight["correction"] != 1, "nothing was learnt from real steps"


def test_steps_before_an_instance_is_ready_are_of_each_kind() -> None:
    steps: list[ScheduleOutput] = []

    class Runner:
        def launch(self, output: ScheduleOutput, features: object) -> Mock:
            steps.append(output)
            return Mock()

    timer = StepTimer(cast(StepRunner, Runner()), num_blocks=64, block_size=16, num_position_axes=1)
    timer.warm_up((), 256, 512)
    assert not steps, "a device that compiles nothing"
    timer.warm_up(((33, 2),), 256, 512)
    alone = [step.decodes[0].sampling for step in steps if not step.prefills]
    assert [sampling.greedy for sampling in alone] == [True]
    behind = [sequence.num_computed for step in steps for sequence, _ in step.prefills]
    assert behind == [0, 16]


@pytest.mark.parametrize(("role", "slo"), [("PD", "tpot"), ("E", "ttft")])
async def test_a_limit_that_cannot_be_met_gives_the_smallest_and_says_what_could(
    model: Path, caplog: pytest.LogCaptureFixture, role: str, slo: str
) -> None:
    caplog.set_level(logging.WARNING)
    async with started(options(model, role, slo={f"{slo}_ms": 0.001})) as instance:
        found = await budgets(instance)
        if role == "PD":
            assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (1, 16)
            assert b'"completion_tokens":6' in await answer(instance, "a", 40), "it serves all the same"
        else:
            assert found["image_budget_pixels"] == IMAGE_PIXELS
    assert f"slo.{slo}_ms" in caplog.text and "lowest feasible limit" in caplog.text


@pytest.mark.parametrize("step_s", [0.3, 1.0, 4.0])
def test_a_start_measures_for_seconds(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])

    def measure(shape: StepShape) -> float:
        now[0] += step_s
        return 0.001 * shape.work.num_tokens

    chosen = options(Path("model"), "P", slo=SLOConfig(ttft_ms=2000), max_num_batched_tokens=4096)
    budget = StepLimits(chosen, {}).find_budget(measure, num_blocks=1000, max_model_len=4000)
    assert now[0] <= MEASURE_S + step_s and budget.pace is not None


def test_what_is_cold_at_first_is_measured_once_it_is_warm() -> None:
    now, num_runs = 0.0, 0

    def run() -> None:
        nonlocal now, num_runs
        num_runs += 1
        now += 0.009 if num_runs <= 20 else 0.006

    assert median_s(run, lambda: now, least_s=0.2) == pytest.approx(0.006)
    assert 0.4 <= now < 0.42, "so long for warming and again for measuring"
