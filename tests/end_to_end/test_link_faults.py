"""Faults in the middle of a transfer: a slow link makes room to hit it. What has died is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from chat import chat
from fleet import Books, deployed
from http_client import http_client
from pictures import noise
from program import until

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_S = 5.0
#: 600 tokens, each with 2 KiB of KV: two seconds on this link.
LONG = "apple " * 200
BYTES_PER_S = 600_000


FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def long_text(number: int, **fields: Any) -> dict[str, Any]:
    """No two have a prefix in common, of which a cache could have the KV already."""
    return chat(f"{number} {LONG}", **FIELDS, **fields)


def picture(number: int) -> dict[str, Any]:
    return chat("What is in it?", noise(number, (160, 120)), **FIELDS)


@dataclass
class Fleet:
    deployment: LocalDeployment
    client: httpx.AsyncClient

    def pid(self, name: str) -> int:
        return self.deployment.instances[name].pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    async def ask(self, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body)

    async def text(self, body: dict[str, Any]) -> str:
        for _ in range(5):
            answer = await self.ask(body)
            if answer.status_code == 200 or "the lease of transfer" not in answer.text:
                break  # else an instance was held up, and what is left of its lease is too short for this link
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    async def held(self, name: str) -> dict[str, int]:
        held: dict[str, int] = (await self.client.get(f"{self.deployment.instances[name].url}/integrity")).json()
        return held

    async def is_seen(
        self, name: str, condition: Callable[[dict[str, int]], bool], *asked: asyncio.Task[Any]
    ) -> bool:
        """Whether what an instance holds came to fulfil a condition before all that was asked was answered."""
        while not all(task.done() for task in asked):
            if condition(await self.held(name)):
                return True
            await asyncio.sleep(0.01)
        return False

    async def recovered(self) -> None:
        """All run again, the gateway knows, and nothing is held anywhere."""

        async def is_whole() -> bool:
            health = await self.client.get("/health")  # 503 where an instance that is ready gets nothing yet
            return health.status_code == 200 and all(one["ready"] for one in health.json()["instances"].values())

        await asyncio.wait_for(self.deployment.wait_ready(), 150)
        await until(is_whole, 150)
        await Books.of(self.deployment).check()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Fleet]:
    async with (
        deployed(
            "E-P-D",
            instances={"peer_timeout_s": LEASE_S},
            baselines={"bandwidth": BYTES_PER_S, "latency_ms": 200},
            backoff_s=0.1,
        ) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        yield Fleet(deployment, client)


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(running: Fleet) -> Fleet:
    """All is well, whatever the test before has left behind."""
    for handle in running.deployment.instances.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle.pid, signal.SIGCONT)
    await running.recovered()
    return running


def being_written(held: dict[str, int]) -> bool:
    return held["reservations"] == 1 and held["blocks"] > 0


def has_a_feature(held: dict[str, int]) -> bool:
    return held["features_held"] == 1


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_after_a_death_in_the_middle_of_a_kv_transfer_the_replacement_answers(
    fleet: Fleet, victim: str
) -> None:
    before = await fleet.text(long_text(1))
    asked = asyncio.create_task(fleet.ask(long_text(200)))
    await fleet.is_seen("d0", being_written, asked)
    fleet.kill(victim)
    answer = await asked
    assert answer.status_code == 200, answer.text
    await fleet.recovered()
    assert await fleet.text(long_text(1)) == before


async def test_after_a_death_behind_the_first_token_the_stream_goes_on(fleet: Fleet) -> None:
    body, text, is_killed = long_text(4, stream=True), "", False
    async with fleet.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for piece in answer.aiter_text():
            if not text and being_written(await fleet.held("d0")):
                fleet.kill("p0")
                is_killed = True
            text += piece
    assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
    await fleet.recovered()
    if not is_killed:
        pytest.skip("the KV was there before P could be killed")


async def test_an_encoder_that_dies_after_its_event(fleet: Fleet) -> None:
    """P is stopped while E announces: when it goes on, the event is there and the feature is gone with E."""
    before = await fleet.text(picture(1))
    old = fleet.pid("e0")
    fleet.kill("p0", signal.SIGSTOP)
    asked = asyncio.create_task(fleet.text(picture(2)))
    assert await fleet.is_seen("e0", has_a_feature, asked)
    fleet.kill("e0")
    await asyncio.sleep(0.3)
    fleet.kill("p0", signal.SIGCONT)
    without = await asked
    await fleet.recovered()
    assert fleet.pid("e0") != old
    assert await fleet.text(picture(2)) == without
    assert await fleet.text(picture(1)) == before
