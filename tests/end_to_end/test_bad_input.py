"""Bad input: a 4xx in OpenAI's error shape with a sentence that helps, and nothing else disturbed."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from chat import chat
from fleet import Books, gateway
from http_client import http_client
from pictures import noise, png
from PIL import Image

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[LocalDeployment]:
    config = DeploymentConfig(topology="E-P-D", gateway={"port": 0}, instances={"base_port": 0, "threads": 1})
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        yield deployment
        await Books({name: instance.url for name, instance in deployment.instances.items()}).check()


def bomb() -> bytes:
    """A PNG of 50 megapixels in a few kilobytes."""
    width, height = 10_000, 5_000

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    header = struct.pack("!IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width // 8 + 1) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def truncated() -> bytes:
    buffer = io.BytesIO()
    noise(1).save(buffer, "JPEG")
    return buffer.getvalue()[:-2000]


GARBAGE = b"{" + b'"a": [' * 1_700_000
CASES: dict[str, tuple[Any, int, str]] = {
    "an image that is none": (chat("What is this?", b"no image at all"), 400, "image"),
    "a truncated image": (chat("What is this?", truncated()), 400, "image"),
    "one broken image of two": (chat("What is this?", noise(1), truncated()), 400, "image"),
    "a 50-megapixel bomb": (chat("What is this?", bomb()), 400, "pixel"),
    "an unreachable URL": (chat("What is this?", "http://127.0.0.1:9/x.png"), 400, "127.0.0.1:9"),
    "no URL": (chat("What is this?", "gopher://x/y.png"), 400, "http"),
    "an unknown model": (chat("Hi") | {"model": "gpt-9"}, 404, "demo"),
    "negative max_tokens": (chat("Hi", max_tokens=-1), 400, "max_tokens"),
    "zero max_tokens": (chat("Hi", max_tokens=0), 400, "max_tokens"),
    "a wrong temperature": (chat("Hi", temperature="warm"), 400, "temperature"),
    "an unknown field": (chat("Hi", temprature=1), 400, "temprature"),
    "no messages": (chat("Hi") | {"messages": []}, 400, "messages"),
    "10 MB of garbage": (GARBAGE, 413, "JSON"),
    "a prompt longer than the context": (chat("apple " * 5000), 400, "context"),
    "max_tokens beyond the context": (chat("Hi", max_tokens=100_000), 400, "max_tokens"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
async def test_is_refused_with_a_sentence(deployment: LocalDeployment, case: str, stream: bool) -> None:
    body, status, word = CASES[case]
    async with http_client(deployment.gateway_url) as client:
        neighbour = asyncio.create_task(client.post("/v1/chat/completions", json=chat("Count to 9.")))
        if isinstance(body, bytes):
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/chat/completions", content=body, headers=headers)
        else:
            answer = await client.post("/v1/chat/completions", json=body | {"stream": stream})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert word in error["message"]
        assert len(error["message"]) < 600
        assert (await neighbour).status_code == 200
    await Books({name: handle.url for name, handle in deployment.instances.items()}).check()


async def test_a_public_gateway_fetches_nothing_from_private_ranges(deployment: LocalDeployment) -> None:
    """The picture is there and can be fetched, by a gateway for this machine alone."""
    picture = png(noise(1))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n" % len(picture))
        writer.write(picture)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    body = chat("What is this?", f"http://127.0.0.1:{port}/x.png", max_tokens=3)
    async with http_client(deployment.gateway_url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    urls = {name: handle.url for name, handle in deployment.instances.items()}
    async with (
        gateway(urls, config={"gateway": {"media": {"allow_private": False}}}) as url,
        http_client(url) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert "a server that this gateway may reach" in answer.json()["error"]["message"]
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"host": "evil.example"}], ids=str
)
async def test_no_web_page_gives_orders_to_an_instance(
    deployment: LocalDeployment, headers: dict[str, str]
) -> None:
    """One byte is a whole order to leave: a page could have a browser send it."""
    async with http_client() as client:
        for handle in deployment.instances.values():
            for path in ("/leave", "/role"):
                answer = await client.post(handle.url + path, content=b"\x80", headers=headers)
                assert answer.status_code == 403 and answer.json()["error"]["code"] == "cross_site"
            assert (await client.get(f"{handle.url}/info", headers=headers)).status_code == 403
        answer = await client.post(f"{deployment.gateway_url}/v1/chat/completions", json=chat("Hi", max_tokens=2))
        assert answer.status_code == 200, answer.text
        data = f"{deployment.gateway_url}/dashboard/data"
        assert (await client.get(data, headers=headers)).status_code == 403
        assert (await client.get(data)).status_code == 200


async def test_a_large_picture_within_the_limits_is_fine(deployment: LocalDeployment) -> None:
    picture = Image.new("RGB", (3000, 2000), (250, 250, 250))
    async with http_client(deployment.gateway_url) as client:
        answer = await client.post("/v1/chat/completions", json=chat("What is this?", picture, max_tokens=3))
    assert answer.status_code == 200, answer.text
