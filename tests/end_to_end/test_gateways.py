"""Gateways that are killed, stopped and reconfigured, side by side over the same instances."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from chat import chat
from fleet import Books, deployed, gateway, is_up, wait_until
from http_client import http_client

from epd_serve.launch.processes.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = chat("Count to 9.", max_tokens=300, ignore_eos=True, stream=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def urls() -> AsyncIterator[dict[str, str]]:
    async with deployed("P-D", restart="never") as deployment:
        yield {name: handle.url for name, handle in deployment.instances.items()}


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
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(url))

    @property
    def is_coming(self) -> bool:
        return self.begun.is_set() and not self.task.done()

    async def _read(self, url: str) -> str:
        async with (
            http_client() as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=BODY) as answer,
        ):
            async for piece in answer.aiter_text():
                self.text += piece
                self.begun.set()
        return self.text


async def test_one_gateway_dies_and_the_other_does_not_notice(urls: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "deployment.yaml"
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
