"""Clients that read no byte of long streams: memory stays bounded, and what they held comes back."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import psutil
import pytest
from chat import chat
from fleet import Books
from http_client import http_client

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

NUM_READERS = 16
#: Each event has the twenty most likely tokens: a stream is several megabytes.
LONG = chat(
    "Tell me.", stream=True, max_tokens=1500, ignore_eos=True, temperature=0, logprobs=True, top_logprobs=20
)


async def unread(url: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer finds next to no room."""
    text = json.dumps(body).encode()
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.setblocking(False)
    address = httpx.URL(url)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(one, (address.host, address.port))
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"Content-Length: {len(text)}\r\n\r\n"
    await loop.sock_sendall(one, head.encode() + text)
    return one


@pytest.mark.slow
async def test_streams_that_nobody_reads_cost_little_and_end() -> None:
    config = DeploymentConfig(
        topology="P-D", gateway={"port": 0, "request_timeout_s": 20.0}, instances={"base_port": 0, "threads": 1}
    )
    async with (
        LocalDeployment(config, ready_timeout_s=300) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        short = chat("Hello", max_tokens=4)
        assert (await client.post("/v1/chat/completions", json=short)).status_code == 200
        processes = {one.spec.name: psutil.Process(one.pid) for one in deployment.processes}
        before = {name: process.memory_info().rss for name, process in processes.items()}
        readers = [await unread(deployment.gateway_url, LONG) for _ in range(NUM_READERS)]
        peak = dict(before)

        async def watch() -> None:
            while True:
                for name, process in processes.items():
                    peak[name] = max(peak[name], process.memory_info().rss)
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(2)
        answer = await client.post("/v1/chat/completions", json=short)
        assert answer.status_code == 200, "a neighbour is served meanwhile"
        await Books({name: instance.url for name, instance in deployment.instances.items()}).check()
        watching.cancel()
        grown = {name: (peak[name] - before[name]) >> 20 for name in before}
        assert max(grown.values()) < 128, grown
        for one in readers:
            one.close()
