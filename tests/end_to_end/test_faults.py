"""Kill any process at any time: the answer is right or a clear error, and the survivors hold nothing after it.

One deployment for all tests, in this order: instances that are killed stay away.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from chat import chat
from fleet import Books, deployed, figures, gateway, is_up, until_decoding, wait_until
from http_client import http_client
from own_ports import free_port
from pictures import noise

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHATS = "/v1/chat/completions"
STREAMED = chat("Count to 9.", max_tokens=300, ignore_eos=True, stream=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[LocalDeployment]:
    instances = {"lease_s": 6, "feature_timeout_s": 8, "max_num_batched_tokens": 64}
    async with deployed("E-P-D", restart="never", instances=instances) as deployment:
        yield deployment


@asynccontextmanager
async def gateway_process(
    config: Path, instances: Mapping[str, str]
) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """A gateway of its own process; its URL once it is ready."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "epd_serve.cli", "proxy", "--port", str(port), "--config", str(config)]
    for name, url in instances.items():
        command += ["--instance", f"{name}={url}"]
    with subprocess.Popen(command) as process:  # noqa: ASYNC220 - nothing else runs yet
        try:
            url = f"http://127.0.0.1:{port}"
            await asyncio.to_thread(wait_until, lambda: is_up(url + "/health"), "the gateway is ready")
            yield url, process
        finally:
            process.kill()


class Stream:
    """One answer as it comes."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self.task = asyncio.create_task(self._read(url))

    @property
    def is_coming(self) -> bool:
        return bool(self.text) and not self.task.done()

    async def _read(self, url: str) -> str:
        async with http_client(url) as client, client.stream("POST", CHATS, json=STREAMED) as answer:
            async for piece in answer.aiter_text():
                self.text += piece
        return self.text


async def test_one_gateway_dies_and_the_other_does_not_notice(deployment: LocalDeployment, tmp_path: Path) -> None:
    config, urls = tmp_path / "deployment.yaml", Books.of(deployment).urls
    config.write_text("{}")
    for _ in range(5):  # where this process is held up, all that one of them had to answer is there when it looks
        async with gateway_process(config, urls) as (one, process), gateway(urls) as other:
            dying, living = [Stream(one) for _ in range(2)], [Stream(other) for _ in range(2)]
            streams = (*dying, *living)
            while not (are_seen := any(one.is_coming for one in dying) and any(one.is_coming for one in living)):
                if all(stream.task.done() for stream in streams):
                    break
                await asyncio.sleep(0.005)
            process.kill()
            ends = await asyncio.gather(*(stream.task for stream in dying), return_exceptions=True)
            texts = await asyncio.gather(*(stream.task for stream in living))
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        cut = [end for end in ends if not (isinstance(end, str) and end.endswith("data: [DONE]\n\n"))]
        assert all(isinstance(error, httpx.TransportError) for error in cut)
        begun = [stream for stream in streams if stream.text]
        assert len({json.loads(stream.text[6:].split("\n")[0])["id"] for stream in begun}) == len(begun)
        await Books(urls).check()
        if are_seen and cut:
            break
    assert are_seen and cut


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Returns "right", "error" (a clear one, before any token) or "cut" (broken off after an error event)."""
    if not body.get("stream"):
        answer = await client.post(CHATS, json=body)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["finish_reason"]
            return "right"
        assert answer.status_code in (429, 502, 503, 504), answer.text
        assert answer.json()["error"]["message"]
        return "error"
    text = ""
    try:
        async with client.stream("POST", CHATS, json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
    except httpx.RemoteProtocolError:
        assert '"error"' in text, "a stream was cut without saying why"
        assert "[DONE]" not in text
        return "cut"
    if answer.status_code != 200:
        assert "message" in text
        return "error"
    assert text.endswith("data: [DONE]\n\n"), "a stream ended in order and is not complete"
    return "right"


async def kill_under_load(deployment: LocalDeployment, client: httpx.AsyncClient, victim: str) -> list[str]:
    """Returns what became of requests that were asked before the instance was killed."""
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
    return await asyncio.wait_for(asyncio.gather(*asked), 300)


async def is_healthy(client: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(150):  # whoever had nothing to do when it died is missed a little later
        while (await client.get("/health")).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_without_e_the_prefill_instance_encodes(deployment: LocalDeployment) -> None:
    seen = chat("What is in the picture?", noise(7), max_tokens=12, ignore_eos=True)
    urls = dict(Books.of(deployment).urls)
    async with http_client(deployment.gateway_url) as client:
        before = await client.post(CHATS, json=seen)
        assert set(await kill_under_load(deployment, client, "e0")) == {"right"}
        urls.pop("e0")
        await Books(urls).check()
        await is_healthy(client, 200)
        after = await client.post(CHATS, json=seen)
        assert before.json()["choices"] == after.json()["choices"]
        new = await client.post(CHATS, json=chat("What is this?", noise(99), max_tokens=4))
        assert new.status_code == 200
    assert (await figures(urls["p0"]))["feature_recomputes_total"] > 0


@pytest.mark.slow
async def test_without_d_nothing_is_answered(deployment: LocalDeployment) -> None:
    async with http_client(deployment.gateway_url) as client:
        assert len(await kill_under_load(deployment, client, "d0")) == 24
        await Books({"p0": deployment.instances["p0"].url}).check()
        await is_healthy(client, 503)
        for body in (chat("Say apple"), chat("What is this?", noise(99), max_tokens=4)):
            assert (await client.post(CHATS, json=body)).status_code == 503
