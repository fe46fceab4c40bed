"""State that all requests of an instance share survives the failure of one."""

from __future__ import annotations

import asyncio

import pytest

from epd_serve.config import InstanceOptions
from epd_serve.engine.pace.step_watch import StepWatch
from epd_serve.instance import instance as module
from epd_serve.instance.instance import Instance
from epd_serve.types import Role


@pytest.fixture
def instance() -> Instance:
    return Instance(InstanceOptions(name="d0", role=Role.parse("D"), model="m", served_model_name="m", port=1))


async def test_housekeeping_goes_on(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOUSEKEEPING_S", 0.01)
    calls: list[int] = []

    class Failing:
        watch = StepWatch()

        def expire(self) -> None:
            calls.append(1)
            raise AssertionError("a reservation in an unknown state")

    instance.language = Failing()  # type: ignore[assignment]
    instance.encoder = Failing()  # type: ignore[assignment]
    housekeeping = asyncio.create_task(instance._housekeep())
    async with asyncio.timeout(300):
        while len(calls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    housekeeping.cancel()
    await asyncio.gather(housekeeping, return_exceptions=True)
