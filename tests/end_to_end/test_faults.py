"""Kill an encoder or a gateway at any time: others answer in its place, and hold nothing after it.

One deployment for all tests, in this order: instances that are killed stay away.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from chat import chat
from fleet import Books, deployed, figures, gateway, until_decoding
from http_client import http_client
from pictures import noise
from program import until

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHATS = "/v1/chat/completions"
#: Longer than it takes to kill whoever sends it.
STREAMED = chat("Count to 9.", max_tokens=1500, ignore_eos=True, stream=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[LocalDeployment]:
    instances = {"peer_timeout_s": 6, "max_num_batched_tokens": 64}
    async with deployed("E-P-D", restart="never", instances=instances) as deployment:
        yield deployment


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Raises AssertionError unless the answer is whole."""
    answer = await client.post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["finish_reason"]


async def kill_under_load(deployment: LocalDeployment, client: httpx.AsyncClient, victim: str) -> None:
    """All requests that were asked before the instance was killed are answered."""
    bodies = [
        chat(
            f"What is number {i}?",
            *([noise(i, (96, 72))] if i % 2 else []),
            max_tokens=150,
            ignore_eos=True,
            stream=i % 3 > 0,
        )
        for i in range(24)
    ]
    for _ in range(3):  # where this process is held up, all have been answered when it looks
        asked = [asyncio.create_task(ask(client, body)) for body in bodies]
        if is_decoding := await until_decoding(deployment.instances["d0"].url, *asked):
            break
    assert is_decoding
    os.kill(deployment.instances[victim].pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*asked), 300)


async def is_healthy(client: httpx.AsyncClient) -> bool:
    return (await client.get("/health")).status_code == 200


async def test_without_e_the_prefill_instance_encodes(deployment: LocalDeployment) -> None:
    seen = chat("What is in the picture?", noise(7), max_tokens=12, ignore_eos=True)
    urls = dict(Books.of(deployment).urls)
    async with http_client(deployment.gateway_url) as client:
        before = await client.post(CHATS, json=seen)
        await kill_under_load(deployment, client, "e0")
        urls.pop("e0")
        await Books(urls).check()
        await until(lambda: is_healthy(client))
        after = await client.post(CHATS, json=seen)
        assert before.json()["choices"] == after.json()["choices"]
        new = await client.post(CHATS, json=chat("What is this?", noise(99), max_tokens=4))
        assert new.status_code == 200
    assert (await figures(urls["p0"]))["feature_recomputes_total"] > 0


async def read_stream(url: str, began: asyncio.Event) -> str:
    text = ""
    async with http_client(url) as client, client.stream("POST", CHATS, json=STREAMED) as answer:
        async for piece in answer.aiter_text():
            text += piece
            began.set()
    return text


async def test_one_gateway_dies_and_the_other_does_not_notice(deployment: LocalDeployment) -> None:
    """Instances end the calls of a dead gateway."""
    urls = {name: url for name, url in Books.of(deployment).urls.items() if name != "e0"}
    [process] = [process for process in deployment.processes if process.spec.name == "gateway"]
    async with gateway(urls) as other:
        began = [asyncio.Event() for _ in range(4)]
        dying, living = (
            [asyncio.create_task(read_stream(url, one)) for one in events]
            for url, events in ((deployment.gateway_url, began[:2]), (other, began[2:]))
        )
        await asyncio.gather(*(one.wait() for one in began))
        os.kill(process.pid, signal.SIGKILL)
        ends = await asyncio.gather(*dying, return_exceptions=True)
        assert all(isinstance(end, httpx.TransportError) for end in ends)
        texts = await asyncio.gather(*living)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    await Books(urls).check()
