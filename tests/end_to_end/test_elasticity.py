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
from program import until

#: One place in a step: whoever waits for it makes decode late on a machine of any speed.
ROLES = {"D": {"max_num_seqs": 1}}
#: Of the first token's time a stage may take half: many answers, and more than one takes when the machine is busy.
SLO = {"ttft_ms": 1500, "tpot_ms": 60000}
PROMPTS = ("The red circle is", "apple banana cherry", "Where is it?")
NUM_CLIENTS = 20


@dataclass
class Site:
    url: str
    admin: str
    client: httpx.AsyncClient
    texts: dict[str, str] = field(default_factory=dict)
    num_answers: int = 0

    async def complete(self, prompt: str) -> None:
        """Its text is the one that came first."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        answer = await self.client.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.num_answers += 1
        text = answer.json()["choices"][0]["text"]
        assert self.texts.setdefault(prompt, text) == text

    async def orders(self) -> list[dict[str, Any]]:
        """Decisions that moved an instance."""
        decisions = (await self.client.get(f"{self.admin}/elastic")).json()["decisions"]
        return [one for one in decisions if one["order"] is not None]

    async def roles(self) -> list[str]:
        """The roles of the ready ones."""
        answer = await self.client.get(f"{self.admin}/instances")
        return sorted(one["role"] for one in answer.json()["instances"] if one["ready"])

    async def load_until(self, enough: Callable[[], Awaitable[bool]]) -> None:
        """Clients that ask one thing after the other."""
        is_enough = False
        prompts = itertools.cycle(PROMPTS)

        async def work() -> None:
            while not is_enough:
                await self.complete(next(prompts))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(work())
            await until(enough, 400)
            is_enough = True


@pytest.mark.slow
async def test_a_late_decode_gets_an_encoder_and_no_answer_notices() -> None:
    port = free_port("127.0.0.1")
    settings = {
        "slo": SLO,
        "roles": ROLES,
        "elastic": {"cooldown_s": 1},
        "instances": {"kv_cache_bytes": 512 << 15},
    }
    async with (
        deployed("2E-P-D", gateway={"admin": {"port": port}}, **settings) as deployment,
        http_client() as client,
    ):
        here = Site(deployment.gateway_url, f"http://127.0.0.1:{port}", client)
        for prompt in PROMPTS:
            await here.complete(prompt)
        picture = chat("What is it?", noise(1), max_tokens=4)
        seen = await client.post(f"{here.url}/v1/chat/completions", json=picture)
        assert not await here.orders(), "nothing is late while instances start, nor with one client"

        async def has_switched() -> bool:
            return await here.roles() == ["D", "D", "E", "P"]

        await here.load_until(has_switched)
        [first] = await here.orders()
        assert first["kind"] == "switch" and first["order"]["role"] == "D" and first["pressures"]["D"] > 1
        enough = here.num_answers + 10

        async def are_many() -> bool:
            return here.num_answers >= enough

        await here.load_until(are_many)
        assert len(await here.orders()) == 1, "one encoder and one prefill instance must be left"
        for prompt in PROMPTS:
            await here.complete(prompt)
        again = await client.post(f"{here.url}/v1/chat/completions", json=picture)
        assert again.json()["choices"] == seen.json()["choices"]
        await Books.of(deployment).check()
