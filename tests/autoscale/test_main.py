"""``epd-serve autoscale`` as a client: the calls that it makes, and gateways that are away for a while."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from epd_serve.autoscale.drift import WINDOW
from epd_serve.autoscale.instance_load import InstanceLoad, to_json
from epd_serve.autoscale.role_loop import autoscale
from epd_serve.config import DeploymentConfig
from epd_serve.rpc.admin import AdminClient
from epd_serve.types import Role, StageRate

SLO = {"ttft_ms": 2000, "tpot_ms": 50}
QUICK = {"cooldown_s": 0.1}


@dataclass
class Gateway:
    """An admin API with a late decode instance, and served requests."""

    orders: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    reported: list[dict[str, Any]] = field(default_factory=list)
    asked_after: list[int] = field(default_factory=list)
    served: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/load":
            roles = {"e0": "E", "e1": "E", "p0": "P", "d0": "D"}
            busy = {"d0": 100.0}
            seen = [
                InstanceLoad(
                    name=name, role=Role.parse(role), num_decoding=busy.get(name, 0), step=StageRate(0.02, 1e-3)
                )
                for name, role in roles.items()
            ]
            return web.json_response({"instances": to_json(seen), "tokens_per_pixel": 0.25})
        if request.path == "/requests/served":
            after = int(request.query["after"])
            self.asked_after.append(after)
            return web.json_response({"last": len(self.served), "requests": self.served[after:]})
        if request.path == "/elastic":
            self.reported.append(await request.json())
        else:
            self.orders.append((request.path, await request.json()))
        return web.json_response({})


@asynccontextmanager
async def serving(gateway: Gateway, path: Path) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


async def until(running: asyncio.Task[None], condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)


async def end(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_late_stage_is_ordered_and_reported_also_after_the_gateway_was_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = DeploymentConfig.model_validate({"slo": SLO, "elastic": QUICK})
    gateway = Gateway()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "admin"
        running = asyncio.create_task(autoscale(config, AdminClient(path)))
        try:
            await until(running, lambda: "nothing answers at" in caplog.text)
            async with serving(gateway, path):
                await until(running, lambda: gateway.orders and any(one["order"] for one in gateway.reported))
        finally:
            await end(running)
    assert gateway.orders[0] == ("/instances/e0/role", {"role": "D", "deadline_s": 30.0})


async def test_served_requests_show_a_drift(caplog: pytest.LogCaptureFixture) -> None:
    config = DeploymentConfig.model_validate(
        {"slo": SLO, "elastic": QUICK, "gateway": {"access_log": "/var/log/served.jsonl"}}
    )
    gateway = Gateway()
    sizes = [20 + number % 5 for number in range(WINDOW)] + [400 + number % 50 for number in range(WINDOW)]
    gateway.served = [
        {
            "time": f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}.000Z",
            "status": 200,
            "images": 0,
            "prompt_tokens": 100 + number % 7,
            "completion_tokens": size,
            "duration_ms": 10.0,
        }
        for number, size in enumerate(sizes)
    ]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, caplog.at_level(logging.INFO):
        async with serving(gateway, Path(folder) / "admin"):
            running = asyncio.create_task(autoscale(config, AdminClient(Path(folder) / "admin")))
            try:
                await until(running, lambda: "answer tokens went from 22 to " in caplog.text)
                await until(running, lambda: len(gateway.asked_after) > 1)
            finally:
                await end(running)
    assert gateway.asked_after[:2] == [0, 2 * WINDOW], "each request is looked at once"
    command = "epd-serve plan --workload trace:/var/log/served.jsonl --devices devices.yaml"
    assert f"{command} --slo ttft=2000,tpot=50" in caplog.text
