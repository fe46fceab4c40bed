"""Decode instances that leave while they decode: clients see nothing of it, whoever dies in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fleet import Books
from in_process import Deployment, deployment

from epd_serve.config import DeploymentConfig
from epd_serve.demo import weights_dir
from epd_serve.launch import Backoff, LocalDeployment
from epd_serve.launch.ports import free_port
from epd_serve.protocol import wire

PROMPTS = ("The red circle is", "apple banana cherry", "Where is it?", "one two three")


def body(prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "stream": stream, "max_tokens": max_tokens}
    return {"model": "demo", "prompt": prompt, **fields}


def outcomes(metrics: str) -> dict[str, float]:
    """How often KV was moved, and how often it was not."""
    head = 'epd_serve_migrations_total{outcome="'
    lines = [line.removeprefix(head) for line in metrics.splitlines() if line.startswith(head)]
    return {line.split('"')[0]: float(line.split()[-1]) for line in lines}


def text_of(events: str) -> str:
    assert events.endswith("data: [DONE]\n\n"), events[-300:]
    return "".join(
        json.loads(line[6:])["choices"][0]["text"] for line in events.splitlines() if line.startswith("data: {")
    )


async def ask(here: Deployment, prompt: str, *, stream: bool) -> str:
    async with here.session.post(f"{here.url}/v1/completions", json=body(prompt, 300, stream=stream)) as answer:
        assert answer.status == 200, await answer.text()
        text: str = text_of(await answer.text()) if stream else (await answer.json())["choices"][0]["text"]
        return text


@pytest.mark.timeout(500)
async def test_streams_and_whole_answers_move_with_their_kv() -> None:
    async with deployment(weights_dir(), "P", "D", "D") as here, asyncio.timeout(400):
        texts = {prompt: await ask(here, prompt, stream=True) for prompt in PROMPTS}
        mover, moved = here.instances["d1"], 0.0
        while not moved:  # an answer may have come to its end before
            asked = [
                (prompt, asyncio.create_task(ask(here, prompt, stream=stream)))
                for prompt in PROMPTS
                for stream in (True, False)
            ]
            while not mover.in_use()["sequences"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await mover.switching.order(wire.RoleOrder(role="P", patience_s=0))
            assert not any(mover.in_use().values())
            for prompt, answer in asked:
                assert await answer == texts[prompt]
            async with here.session.get(f"{here.url}/metrics") as metrics:
                moved = outcomes(await metrics.text())["moved"]
            await mover.switching.order(wire.RoleOrder(role="D"))
        await here.settle()


class Site:
    """P and two D; one of these is to leave, and the other one is stopped, so that nothing gets there."""

    def __init__(self, deployment: LocalDeployment, admin: str, client: httpx.AsyncClient) -> None:
        self.deployment = deployment
        self.admin = admin
        self.client = client

    async def ask(self) -> str:
        asked = body(PROMPTS[0], 1500, stream=True)
        answer = await self.client.post(f"{self.deployment.gateway_url}/v1/completions", json=asked)
        return text_of(answer.text)

    async def held(self, name: str) -> dict[str, int]:
        url = self.deployment.instances[name].url
        held: dict[str, int] = (await self.client.get(f"{url}/integrity")).json()
        return held

    def kill(self, name: str, number: signal.Signals) -> None:
        os.kill(self.deployment.instances[name].pid, number)

    async def decoding(self) -> tuple[str, str]:
        """The D that decodes, and the other."""
        while True:
            for name, other in (("d0", "d1"), ("d1", "d0")):
                if (await self.held(name))["sequences"]:
                    return name, other
            await asyncio.sleep(0.01)

    async def order(self, name: str, role: str) -> int:
        wanted = {"role": role, "deadline_s": 60, "patience_s": 0}
        return (await self.client.post(f"{self.admin}/instances/{name}/role", json=wanted)).status_code

    async def begin(self, answer: asyncio.Task[str]) -> tuple[str, str, asyncio.Task[int]] | None:
        """The D whose answer is broken off, with its KV there, the other, which is stopped, and the order to the
        first; None where the answer has come to its end before."""
        source, target = await self.decoding()
        self.kill(target, signal.SIGSTOP)
        ordered = asyncio.create_task(self.order(source, "P"))
        while not answer.done():
            held = await self.held(source)
            if held["blocks"] and not held["sequences"] and not held["timeline"]:
                return source, target, ordered
            await asyncio.sleep(0.002)
        self.kill(target, signal.SIGCONT)
        await ordered
        await self.ready()
        assert await self.order(source, "D") == 200
        return None

    async def ready(self) -> None:
        await self.deployment.wait_ready()
        while True:
            answer = await self.client.get(f"{self.admin}/admin/instances")
            if all(one["ready"] and not one["draining"] for one in answer.json()["instances"]):
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    port = free_port("127.0.0.1")
    config = DeploymentConfig.model_validate(
        {
            "topology": "P-2D",
            "gateway": {
                "port": 0,
                "admin": {"port": port},
                "failover": {"wait_s": 60},
                "health": {"probe_interval_s": None},
            },
            "instances": {"base_port": 0, "threads": 1},
        }
    )
    deployment = LocalDeployment(config, ready_timeout_s=120, backoff=lambda: Backoff(first_s=0.05, limit_s=0.05))
    async with deployment, httpx.AsyncClient(timeout=150, trust_env=False) as client:
        yield Site(deployment, f"http://127.0.0.1:{port}", client)


@pytest.mark.timeout(600)
async def test_whoever_dies_in_the_middle_the_answer_goes_on() -> None:
    async with site() as here, asyncio.timeout(500):
        text = await here.ask()
        for victim in ("source", "target"):
            while True:
                await here.ready()
                answer = asyncio.create_task(here.ask())
                begun = await here.begin(answer)
                if begun is not None:
                    break
                assert await answer == text
            source, target, ordered = begun
            here.kill(source if victim == "source" else target, signal.SIGKILL)
            if victim == "source":
                here.kill(target, signal.SIGCONT)
            assert await answer == text
            assert (await ordered == 200) == (victim == "target")
            if victim == "target":
                assert await here.order(source, "D") == 200
        await here.ready()
        metrics = await here.client.get(f"{here.deployment.gateway_url}/metrics")
        assert outcomes(metrics.text) == {"moved": 0.0, "fallen_back": 2.0}
        await Books({name: one.url for name, one in here.deployment.instances.items()}).check()
