"""Endless headers and bodies, before any proof, at each port on which a deployment listens."""

import asyncio
import contextlib
import socket
import time
from statistics import median
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import uvicorn
from gateway_settings import admin_plane
from servers import served

from epd_serve.instance.calls import LookApp
from epd_serve.rpc.messages import OPENING
from epd_serve.rpc.server import LinkService, Reply
from epd_serve.transfer.embedded import EmbeddedTransport

KEY = "0123456789abcdef-"
SENT_BYTES = 256 << 20
#: What the kernel holds of both ends, and what is read before the limit is seen.
MAX_TAKEN_BYTES = 24 << 20

LINES = b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"x-filler: " + b"a" * 20000 + b"\r\n"
ONE_LINE = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-filler: ", b"a" * 20000
TRAILERS = (
    b"POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
    b"x-filler: " + b"a" * 20000 + b"\r\n",
)
TARGET = b"GET /", b"a" * 20000
HELLO = OPENING + b"\xff\xff\x00\x00", b"a" * 20000


def resident_bytes():
    return psutil.Process().memory_info().rss


@contextlib.asynccontextmanager
async def instance(key):
    async def answer(body):
        return Reply(body=b"ok")

    service = LinkService(calls={"/health": answer}, key=key)
    config = uvicorn.Config(LookApp(service), port=0, lifespan="off", log_level="critical", http=service.protocol)
    async with served(uvicorn.Server(config)) as url:
        yield url


def send_without_end(url, begin, piece, timeout_s=20):
    """Send until the server ends the connection; the number of bytes that it took."""
    parts, num_sent = urlsplit(url), 0
    one = socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
    with one, contextlib.suppress(ConnectionError, TimeoutError):
        one.sendall(begin)
        while num_sent < SENT_BYTES:
            one.sendall(piece)
            num_sent += len(piece)
    return num_sent


@pytest.mark.parametrize(
    "sent", [LINES, ONE_LINE, TRAILERS, TARGET, HELLO], ids=["lines", "line", "trailers", "target", "hello"]
)
@pytest.mark.parametrize("port", ["instance", "keyless instance", "admin", "gateway", "data"])
async def test_headers(start, port, sent):
    async with contextlib.AsyncExitStack() as stack:
        if port == "data":
            transport = EmbeddedTransport(path="tcp", key=KEY)
            stack.callback(transport.close)
            region = transport.allocate("slab", 64).region
            url = f"http://{region.host}:{region.port}"
            neighbour = await stack.enter_async_context(instance(KEY))
        elif port.endswith("instance"):
            url = neighbour = await stack.enter_async_context(instance(KEY if port == "instance" else None))
        else:
            gateway = await start("a0:EPD", admin=admin_plane(key="secret"))
            url = gateway.app.state.admin_url if port == "admin" else gateway.url
            neighbour = gateway.url
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask():
            began_s = time.monotonic()
            async with client.get(f"{neighbour}/health") as answer:
                assert answer.status == 200
            return time.monotonic() - began_s

        await ask()
        before = resident_bytes()
        sending = asyncio.create_task(asyncio.to_thread(send_without_end, url, *sent))
        waits_s = [await ask()]
        while not sending.done():
            waits_s.append(await ask())
        assert await sending < MAX_TAKEN_BYTES
        assert resident_bytes() - before < 16 << 20
        assert median(waits_s) < 1.0 and max(waits_s) < 5.0, "a healthy neighbour is answered meanwhile"


@pytest.mark.parametrize("path", ["/health", "/stage/prefill"])
async def test_a_body_before_a_proof_takes_no_memory(path):
    head = f"GET {path} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    async with instance(KEY) as url:
        before = resident_bytes()
        await asyncio.to_thread(send_without_end, url, head, b"10000\r\n%b\r\n" % (b"a" * (1 << 16)), timeout_s=1)
        assert resident_bytes() - before < 16 << 20


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nx: ", OPENING[:5], OPENING + b"\x10"])
async def test_slow_request_heads_are_cut_off(monkeypatch, begin):
    monkeypatch.setattr("epd_serve.rpc.bounded.HEADER_S", 0.3)
    async with instance(KEY) as url:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(begin)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
