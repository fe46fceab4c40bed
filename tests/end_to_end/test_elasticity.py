"""The controller among real processes: a late stage gets an instance by itself, and no answer notices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from chat import chat
from fleet import Books, deployed
from http_client import http_client
from own_ports import free_port
from pictures import noise

from epd_serve.launch.deployment import LocalDeployment

#: One place in a step: whoever waits for it makes decode late on a machine of any speed.
ROLES = {"D": {"max_num_seqs": 1}}
#: Of the first token's time a stage may take half: many answers, and more than one takes when the machine is busy.
SLO = {"ttft_ms": 1500, "tpot_ms": 60000}
PROMPTS = ("The red circle is", "apple banana cherry", "Where is it?")
NUM_CLIENTS = 20


@dataclass
class Site:
    deployment: LocalDeployment
    admin: str
    client: httpx.AsyncClient
    texts: dict[str, str] = field(default_factory=dict)
    num_answers: int = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.client.post(f"{self.deployment.gateway_url}/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        self.num_answers += 1
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async def complete(self, prompt: str) -> None:
        """Its text is the one that came first."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        text = (await self.post("completions", body))["text"]
        assert self.texts.setdefault(prompt, text) == text

    async def decisions(self) -> list[dict[str, Any]]:
        answer = await self.client.get(f"{self.admin}/elastic")
        found: list[dict[str, Any]] = answer.json()["decisions"]
        return found

    async def roles(self) -> dict[str, str]:
        """The roles of the ready ones."""
        answer = await self.client.get(f"{self.admin}/instances")
        return {one["name"]: one["role"] for one in answer.json()["instances"] if one["ready"]}

    async def load(self, ask: Callable[[int], Awaitable[Any]], enough: Callable[[], Awaitable[bool]]) -> None:
        """Clients that ask one thing after the other, until ``enough``."""
        is_enough = False
        numbers = itertools.count()

        async def work() -> None:
            while not is_enough:
                await ask(next(numbers))

        async with asyncio.timeout(400), asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(work())
            while not await enough():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            is_enough = True


def ordered(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in decisions if one["order"] is not None]


@pytest.mark.slow
async def test_a_late_decode_gets_an_encoder_and_no_answer_notices() -> None:
    port = free_port("127.0.0.1")
    settings = {"slo": SLO, "roles": ROLES, "elastic": {"cooldown_s": 1}, "instances": {"num_blocks": 512}}
    async with (
        deployed("2E-P-D", gateway={"admin": {"port": port}}, **settings) as deployment,
        http_client() as client,
    ):
        here = Site(deployment, f"http://127.0.0.1:{port}", client)
        for prompt in PROMPTS:
            await here.complete(prompt)
        picture = chat("What is it?", noise(1), max_tokens=4)
        seen = await here.post("chat/completions", picture)
        assert not ordered(await here.decisions()), "nothing is late while instances start, nor with one client"

        async def has_switched() -> bool:
            roles = await here.roles()
            return len(roles) == 4 and sorted(roles.values()) == ["D", "D", "E", "P"]

        await here.load(lambda number: here.complete(PROMPTS[number % 3]), has_switched)
        first, *more = ordered(await here.decisions())
        assert first["kind"] == "switch" and first["order"]["role"] == "D"
        assert first["reason"].startswith("decode is at "), first
        assert first["pressures"]["D"] > 1
        assert not more, "one encoder and one prefill instance must be left"
        log = (here.deployment.log_dir / "autoscale.log").read_text()
        assert f"elastic: {first['reason']}" in log and f"elastic: {first['order']['instance']} serves D" in log

        enough = here.num_answers + 10

        async def are_many() -> bool:
            return here.num_answers >= enough

        await here.load(lambda number: here.complete(PROMPTS[number % 3]), are_many)
        assert len(ordered(await here.decisions())) == 1, "too much for all that there is moves nobody to and fro"
        for prompt in PROMPTS:
            await here.complete(prompt)
        assert await here.post("chat/completions", picture) == seen
        await Books.of(here.deployment).check()
