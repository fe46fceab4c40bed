"""Real processes change their roles under load and die on the way: the deployment serves, before and after."""

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

from epd_serve.cli import main as cli
from epd_serve.config import DeploymentConfig
from epd_serve.launch import Backoff, LocalDeployment
from epd_serve.launch.ports import free_port

QUESTION = {"model": "demo", "prompt": "apple banana cherry", "temperature": 0, "ignore_eos": True}


class Site:
    def __init__(self, deployment: LocalDeployment, admin: str, client: httpx.AsyncClient) -> None:
        self.deployment = deployment
        self.admin = admin
        self.client = client

    async def order(self, name: str, role: str, **limits: Any) -> tuple[int, dict[str, Any]]:
        answer = await self.client.post(f"{self.admin}/instances/{name}/role", json={"role": role, **limits})
        return answer.status_code, answer.json()

    async def info(self, name: str) -> dict[str, Any]:
        answer = await self.client.get(f"{self.deployment.instances[name].url}/info")
        return answer.json() if answer.status_code == 200 else {"state": "", "role": "", "pid": 0}

    async def until(self, name: str, **wanted: Any) -> dict[str, Any]:
        """Its info, once these values are there; None for any that is not 0 or empty."""
        async with asyncio.timeout(60):
            while True:
                try:
                    info = await self.info(name)
                except httpx.TransportError:
                    info = {}
                if all(info.get(key) == value for key, value in wanted.items()):
                    return info
                await asyncio.sleep(0.002)

    async def text(self, **more: Any) -> str:
        body = QUESTION | {"max_tokens": 60} | more
        answer = await self.client.post(f"{self.deployment.gateway_url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    @asynccontextmanager
    async def streaming(self, **more: Any) -> AsyncIterator[httpx.Response]:
        body = QUESTION | {"stream": True} | more
        url = f"{self.deployment.gateway_url}/v1/completions"
        async with self.client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200
            yield answer


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    port = free_port("127.0.0.1")
    gateway = {"port": 0, "admin": {"port": port}}
    config = DeploymentConfig.model_validate(
        {"topology": "2P-2D", "gateway": gateway, "instances": {"base_port": 0, "threads": 1}}
    )
    async with (
        LocalDeployment(
            config, ready_timeout_s=120, backoff=lambda: Backoff(first_s=0.1, limit_s=0.1)
        ) as deployment,
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
    ):
        yield Site(deployment, f"http://127.0.0.1:{port}", client)


async def whole(answer: httpx.Response) -> str:
    text = ""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
    return text


@pytest.mark.timeout(240)
async def test_switches_kills_and_calls_back(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    async with site() as here:
        before = await here.text()
        long = await here.text(max_tokens=200)
        for name, role in (("p1", "D"), ("d0", "PD")):
            async with here.streaming(max_tokens=200) as one, here.streaming(max_tokens=200) as other:
                status, said = await here.order(name, role, patience_s=0)
                assert status == 200 and said["to"] == role, said
                assert await asyncio.gather(whole(one), whole(other)) == [long, long]
            assert await here.text() == before
        # now p0: P, p1: D, d0: PD, d1: D. A stream of two choices holds a drain up.
        async with here.streaming(n=2, max_tokens=400, seed=1) as held:
            busy = [name for name in ("p1", "d0", "d1") if (await here.info(name))["load"].get("num_running")]
            ordered = asyncio.create_task(here.order(busy[0], "E", deadline_s=100))
            info = await here.until(busy[0], state="DRAINING")
            assert (await here.order(busy[0], "EPD"))[0] == 409
            assert (await here.order(busy[0], info["role"]))[0] == 200
            assert (await ordered)[0] == 409
            await here.until(busy[0], state="SERVING", ready=True, role=info["role"])
            assert await whole(held)
        # killed while it drains: it comes back in its old role
        async with here.streaming(n=2, max_tokens=400, seed=1):
            busy = [name for name in ("p1", "d0", "d1") if (await here.info(name))["load"].get("num_running")]
            ordered = asyncio.create_task(here.order(busy[0], "E", deadline_s=100))
            info = await here.until(busy[0], state="DRAINING")
            os.kill(info["pid"], signal.SIGKILL)
            assert (await ordered)[0] >= 500
        await here.until(busy[0], state="SERVING", ready=True, role=info["role"], epoch=0)
        assert await here.text() == before
        # killed while it is rebuilt, or just after: it comes back in its new one
        ordered = asyncio.create_task(here.order("d1", "EPD"))
        seen = await here.info("d1")
        while not ordered.done() and seen["state"] != "REBUILDING":
            seen = await here.info("d1")
        os.kill(seen["pid"], signal.SIGKILL)
        await ordered
        await here.until("d1", state="SERVING", ready=True, role="EPD", epoch=0)
        assert await here.text() == before
        monkeypatch.setattr("sys.argv", ["epd-serve", "switch", "d1", "D", "--admin", here.admin])
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(cli)
        assert ended.value.code == 0 and "d1: EPD → D in" in capsys.readouterr().out
        await Books({name: one.url for name, one in here.deployment.instances.items()}).check()
