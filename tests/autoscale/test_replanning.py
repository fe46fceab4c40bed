"""A drift of what the gateway serves ends in a plan for the new workload, made by the real planner."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_serve.autoscale.replanning import Replanner
from epd_serve.config import DeploymentConfig
from epd_serve.config.load import parse_config
from epd_serve.protocol.wire import MediaRef
from epd_serve.telemetry.span import join
from epd_serve.topology import Topology
from proxy.observe.access_log import line_of
from proxy.observe.record import RequestRecord


def served(number: int, *, output: int, status: int = 200) -> bytes:
    draw = random.Random(number)
    made = RequestRecord("chat", join(), str(number), 1000.0 + 0.5 * number)
    made.media([(MediaRef("", 802, 652), 1000)])
    made.prompt_tokens, made.output_tokens = 600 + draw.randrange(200), output + draw.randrange(output)
    made.status, made.end_s, made.duration_s = status, made.arrived_s + 1.0, 1.0
    return msgspec.json.encode(line_of(made, 0.0))


def drifting(**options: Any) -> DeploymentConfig:
    return DeploymentConfig.model_validate({"elastic": {"drift": {"num_requests": 20, **options}}})


@pytest.mark.slow
async def test_longer_answers_are_said_and_planned_for(tmp_path: Path) -> None:
    fleet, told = tmp_path / "fleet.yaml", tmp_path / "told.json"
    fleet.write_text("model: qwen2-vl-7b\npools: [{device: a100, count: 1}]")
    program = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + chr(10))"
    config = DeploymentConfig.model_validate(
        {
            "slo": {"ttft_ms": 4000, "tpot_ms": 100},
            "elastic": {
                "drift": {"num_requests": 25, "devices": fleet, "most": 50},
                "hook": {"command": [sys.executable, "-c", program]},
            },
        }
    )
    replanner = Replanner(config)
    replanner.tokens_per_pixel = 1 / 784
    running = asyncio.create_task(replanner.run())
    try:
        for number in range(60):
            replanner.put(served(number, output=20))
        replanner.put(served(60, output=2000, status=500))
        await asyncio.sleep(0)
        assert replanner.drifts == []
        for number in range(61, 90):
            replanner.put(served(number, output=200))
        async with asyncio.timeout(300):
            while replanner.plan is None or len(told.read_text().splitlines()) < 2:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.02)
        assert "tokens of an answer went from" in replanner.drifts[0]
        drift, plan = (json.loads(line) for line in told.read_text().splitlines())
        assert (drift["event"], plan["event"]) == ("drift", "plan")
        assert plan["plan"] == replanner.plan.read_text()
        planned = parse_config(plan["plan"])
        assert isinstance(planned.topology, Topology) and planned.topology.num_devices == 1
        assert planned.slo.tpot_ms == 100
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not replanner.plan.exists()


async def test_a_plan_that_fails_is_said_and_nothing_else(tmp_path: Path, caplog: object) -> None:
    replanner = Replanner(drifting(devices=tmp_path / "none.yaml"))
    for number in range(80):
        replanner.put(served(number, output=20 if number < 40 else 400))
    running = asyncio.create_task(replanner.run())
    try:
        async with asyncio.timeout(300):
            while "none.yaml" not in caplog.text:  # type: ignore[attr-defined]
                assert not running.done()
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert replanner.plan is None


async def test_a_plan_is_applied_where_that_is_enabled(tmp_path: Path) -> None:
    """By the command, whose arguments a program in its place writes down."""
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(
        "import pathlib, sys\n"
        "if sys.argv[1] == 'plan':\n"
        "    pathlib.Path(sys.argv[sys.argv.index('--output') + 1]).write_text('topology: EPD')\n"
        '    print(\'{"recommended": "EPD"}\')\n'
        "else:\n"
        f"    part = pathlib.Path({str(told)!r} + '.part')\n"
        "    part.write_text(' '.join(sys.argv[1:]))\n"
        f"    part.rename({str(told)!r})\n"
    )
    config = drifting(devices=tmp_path / "fleet.yaml", apply=True)
    replanner = Replanner(config, (sys.executable, str(program)))
    replanner.deployment = ("--gateway", "127.0.0.1:8000")
    for number in range(80):
        replanner.put(served(number, output=20 if number < 40 else 400))
    running = asyncio.create_task(replanner.run())
    try:
        async with asyncio.timeout(300):
            while not told.exists():
                assert not running.done()
                await asyncio.sleep(0.02)
        assert replanner.plan is not None
        assert told.read_text() == f"apply {replanner.plan} --topology-only --gateway 127.0.0.1:8000"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_full_disk_costs_one_plan_and_not_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refuses = (sys.executable, "-c", "raise SystemExit('the second one got there')")
    replanner = Replanner(drifting(devices=tmp_path / "none.yaml"), refuses)
    running = asyncio.create_task(replanner.run())

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                assert not running.done(), running.exception()
                await asyncio.sleep(0.02)

    def serve(numbers: range, output: int) -> None:
        for number in numbers:
            replanner.put(served(number, output=output))

    try:
        await until(lambda: any(tmp_path.iterdir()))
        directory = next(tmp_path.iterdir())  # noqa: ASYNC240
        directory.rmdir()  # nothing can be written there
        serve(range(40), 20)
        serve(range(40, 80), 400)
        await until(lambda: "the drift is left without a plan" in caplog.text)
        directory.mkdir()
        serve(range(80, 160), 20)
        await until(lambda: "the second one got there" in caplog.text)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
