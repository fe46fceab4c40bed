"""Processes that die in the middle of a role switch, at each of its states: the deployment serves on, whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import pytest
from chat import chat, stream_events
from fleet import Books, deployed, gateway
from http_client import http_client
from own_ports import free_port
from PIL import Image

from epd_serve.demo import weights_dir
from epd_serve.instance.calls import Peers
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.protocol import wire

QUESTION = {"model": "demo", "prompt": "apple banana cherry", "temperature": 0, "ignore_eos": True, "stream": True}
PICTURE = chat("What is it?", Image.new("RGB", (64, 64), "red"), max_tokens=8)
#: The one that changes its role; the others keep theirs.
MOVER = "d1"
#: State of a switch from D to E, what is killed in it, the role that the instance has then, and its epoch.
FAULTS = [
    ("DRAINING", MOVER, "D", 0),
    ("REBUILDING", MOVER, "E", 0),  # in the role that it was to have
    ("SERVING", MOVER, "E", 0),  # before the gateway has heard of it
    ("DRAINING", "gateway", "D", 0),  # nobody wants it any more
    ("REBUILDING", "gateway", "E", 1),  # that comes to its end, and the next gateway finds it so
]


class Site:
    """A deployment, the gateway that gives orders, and another one that does not."""

    def __init__(self, deployment: LocalDeployment, admin: str, other_url: str, client: httpx.AsyncClient) -> None:
        self.deployment = deployment
        self.admin = admin
        self.urls = [deployment.gateway_url, other_url]
        self.client = client
        self.text = ""
        self.num_asked: Counter[str] = Counter()

    async def order(self, role: str) -> tuple[int, str]:
        """Status and text; 0 where the gateway is gone."""
        body = {"role": role, "deadline_s": 3600, "patience_s": 0}
        try:
            answer = await self.client.post(f"{self.admin}/instances/{MOVER}/role", json=body)
        except httpx.TransportError as error:
            return 0, repr(error)
        return answer.status_code, answer.text

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """The instance's report, once these values are there."""
        async with asyncio.timeout(300):
            while True:
                info: dict[str, Any] = {}
                try:
                    answer = await self.client.get(f"{self.deployment.instances[MOVER].url}/info")
                    if answer.status_code == 200:
                        info = answer.json()
                except httpx.TransportError:
                    pass
                if info and all(info.get(key, 0) == value for key, value in wanted.items()):
                    return info
                await asyncio.sleep(0.002)

    async def until_known(self, role: str) -> None:
        """Wait until the gateway that gives orders takes the instance for ready in a role, and gives it work."""
        async with asyncio.timeout(300):
            while True:
                try:
                    answer = await self.client.get(f"{self.admin}/instances")
                    [record] = [one for one in answer.json()["instances"] if one["name"] == MOVER]
                    if record["role"] == role and record["ready"] and not record["draining"]:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.01)

    async def serves(self, role: str, *, epoch: int) -> None:
        """The instance has the role, after so many changes in its process, and all is answered as before."""
        info = await self.until(state="SERVING", ready=True, role=role)
        assert info.get("epoch", 0) == epoch, info
        await self.until_known(role)
        for url in self.urls:
            assert await self.ask(url) == self.text
            answer = await self.client.post(f"{url}/v1/chat/completions", json=PICTURE)
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]

    async def begin_anew(self) -> None:
        """As D in a process that has never had a tower: it has to load one, which :meth:`rebuilding` holds up."""
        assert (await self.order("D"))[0] == 200
        os.kill((await self.until(role="D"))["pid"], signal.SIGKILL)
        await self.serves("D", epoch=0)

    async def ask(self, url: str) -> str:
        """The text of a greedy stream."""
        answer = await self.client.post(f"{url}/v1/completions", json=QUESTION | {"max_tokens": 40})
        assert answer.status_code == 200, answer.text
        return "".join(event["choices"][0]["text"] for event in stream_events(answer.text))

    async def keep_asking(self, url: str) -> None:
        """Until cancelled; whatever happens, all answers are the same, but those of a gateway that is killed."""
        while True:
            try:
                assert await self.ask(url) == self.text
                self.num_asked[url] += 1
            except httpx.TransportError:
                assert url == self.urls[0], "the other gateway goes on"
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def draining(self, peers: Peers) -> AsyncIterator[None]:
        """KV that somebody may still announce keeps the instance from being empty, for as long as this lasts."""
        config = json.loads((weights_dir() / "config.json").read_text())["text_config"]
        info = await self.until(ready=True)
        sizes = (config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        layout = wire.KVLayout(*sizes, info["block_size"], info["dtype"], info["media_fingerprint"])
        nowhere = wire.Region(name="kv", nbytes=1, host_id="h", pid=1, fd=1, host="", port=0)
        reserve = wire.ReserveRequest("t", "r", 8, 8, 1, [], layout, 3600, nowhere)
        await peers.call(info["url"], "/kv/reserve", reserve)
        try:
            yield
        finally:
            ref = wire.TransferRef("t", "r")
            if (await self.until())["pid"] == info["pid"]:
                await peers.call(info["url"], "/kv/cancel", ref)

    def signal_gateway(self, number: signal.Signals) -> None:
        [process] = [one for one in self.deployment.processes if one.spec.name == "gateway"]
        os.kill(process.pid, number)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    port = free_port("127.0.0.1")
    async with (
        deployed(
            "E-P-2D",
            gateway={"admin": {"port": port}},
            instances={"resident": "role"},  # making stages takes a while
            backoff_s=0.05,
        ) as deployment,
        http_client() as client,
    ):
        urls = {name: one.url for name, one in deployment.instances.items()}
        async with gateway(urls) as other_url:
            yield Site(deployment, f"http://127.0.0.1:{port}", other_url, client)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_whatever_dies_during_a_switch_the_deployment_serves() -> None:
    async with site() as here, asyncio.TaskGroup() as group:
        peers = Peers()
        here.text = await here.ask(here.urls[0])
        assert here.text
        asking = [group.create_task(here.keep_asking(url)) for url in here.urls]

        for state, victim, role, epoch in FAULTS:
            async with here.draining(peers) if state == "DRAINING" else nullcontext():
                ordered = group.create_task(here.order("E"))
                info = await here.until(state="REBUILDING" if state == "SERVING" else state)
                if state == "SERVING":  # and the gateway must not hear of it
                    here.signal_gateway(signal.SIGSTOP)
                    info = await here.until(state=state, role="E")
                if victim == MOVER:
                    os.kill(info["pid"], signal.SIGKILL)
                else:
                    here.signal_gateway(signal.SIGKILL)
                if state == "SERVING":
                    here.signal_gateway(signal.SIGCONT)
                status, said = await ordered
                if victim == "gateway":
                    assert status == 0, said
                elif state != "SERVING":
                    assert status >= 500 and MOVER in said
                await here.serves(role, epoch=epoch)
            if role == "E" and victim == MOVER:
                await here.begin_anew()
        assert (await here.order("D"))[0] == 200
        await here.serves("D", epoch=2)

        for task in asking:
            assert not task.done(), task.result()
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await peers.close()
        assert min(here.num_asked[url] for url in here.urls) > 10
        await Books.of(here.deployment).check()
