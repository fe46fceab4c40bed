"""``epd-serve autoscale`` as a client of the admin API: its looks, orders and reports."""

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
from program import until
from servers import answered

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
    """An admin API whose decode instance is late until another one helps.

    Attributes:
        refusal: status with which orders are refused; 0: they are carried out.
        blind: looks that fail, from the first on.
    """

    refusal: int = 0
    blind: int = 0
    roles: dict[str, str] = field(default_factory=lambda: {"e0": "E", "e1": "E", "p0": "P", "d0": "D"})
    orders: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    reported: list[dict[str, Any]] = field(default_factory=list)
    asked_after: list[int] = field(default_factory=list)
    served: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/load":
            self.blind -= 1
            return _refused(503) if self.blind >= 0 else web.json_response(self.load())
        if request.path == "/requests/served":
            after = int(request.query["after"])
            self.asked_after.append(after)
            return web.json_response({"last": len(self.served), "requests": self.served[after:]})
        if request.path == "/elastic":
            self.reported.append(await request.json())
            return web.json_response({})
        body = await request.json()
        self.orders.append((request.path, body))
        if self.refusal:
            return _refused(self.refusal)
        self.roles[request.path.split("/")[2]] = body["role"]
        return web.json_response({})

    def load(self) -> dict[str, Any]:
        num_decoding = 100.0 if list(self.roles.values()).count("D") == 1 else 10.0
        seen = [
            InstanceLoad(
                name=name,
                role=Role.parse(role),
                num_decoding=num_decoding if role == "D" else 0.0,
                step=StageRate(0.02, 1e-3),
            )
            for name, role in self.roles.items()
        ]
        return {"instances": to_json(seen), "tokens_per_pixel": 0.25}


def _refused(status: int) -> web.Response:
    return web.json_response({"error": {"message": "not now"}}, status=status)


@asynccontextmanager
async def controlled(gateway: Gateway, *, late: bool = False, **options: Any) -> AsyncIterator[Callable[..., Any]]:
    """Run the command beside a gateway; yields a wait for a condition. ``late``: the gateway comes later."""
    config = DeploymentConfig.model_validate({"slo": SLO, "elastic": QUICK | options})
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "admin"
        running = asyncio.create_task(autoscale(config, AdminClient(path)))

        async def wait(condition: Callable[[], object]) -> None:
            await until(lambda: condition() or running.done())
            assert not running.done(), running.exception()

        try:
            if late:
                await asyncio.sleep(0.1)
            async with answered(gateway.answer, path=path):
                yield wait
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_late_stage_gets_an_instance_also_after_the_gateway_was_away() -> None:
    gateway = Gateway()
    async with controlled(gateway, late=True) as wait:
        await wait(lambda: gateway.orders and gateway.reported[-1]["kind"] == "calm")
    assert gateway.orders == [("/instances/e0/role", {"role": "D", "deadline_s": 30.0})]
    switch = next(one for one in gateway.reported if one["order"])
    assert switch["order"] == {"instance": "e0", "role": "D"} and switch["pressures"]["D"] == 2.4


@pytest.mark.parametrize(("status", "second"), [(400, "e1"), (503, "e0")])
async def test_a_failed_order_is_repeated_unless_refused_for_good(status: int, second: str) -> None:
    gateway = Gateway(refusal=status)
    async with controlled(gateway) as wait:
        await wait(lambda: len(gateway.orders) >= 2)
    assert [path for path, _ in gateway.orders[:2]] == ["/instances/e0/role", f"/instances/{second}/role"]


async def test_failed_polls_are_logged_once_and_repeated() -> None:
    gateway = Gateway(blind=5)
    async with controlled(gateway) as wait:
        await wait(lambda: len(gateway.reported) > 1)
    assert gateway.reported[0]["kind"] == "undecided" and gateway.reported[1]["kind"] != "undecided"


async def test_served_requests_show_a_drift(caplog: pytest.LogCaptureFixture) -> None:
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
    with caplog.at_level(logging.WARNING):
        async with controlled(gateway) as wait:
            await wait(lambda: "epd-serve plan --workload trace:" in caplog.text)
            await wait(lambda: len(gateway.asked_after) > 1)
    assert gateway.asked_after[:2] == [0, 2 * WINDOW], "each request is looked at once"
