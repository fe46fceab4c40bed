"""Requests over plain connections: in pieces, ahead of answers, with unusual heads."""

from __future__ import annotations

import asyncio
import json

import pytest

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


def post(body: bytes = BODY, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Peer:
    """A client that writes what it likes."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def answer(self):
        """(status, headers, body) of the next answer; the body without chunk framing."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            if head[0].split()[1] in ("100", "102"):
                return await self.answer()
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = b""
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
        return int(head[0].split()[1]), headers, body

    async def ask(self, data):
        self.writer.write(data)
        return await self.answer()


@pytest.fixture
async def connect():
    """``await connect(gateway)`` → Peer."""
    peers = []

    async def open_one(gateway):
        host, port = gateway.url.removeprefix("http://").split(":")
        peers.append(Peer(*await asyncio.open_connection(host, int(port))))
        return peers[-1]

    yield open_one
    for peer in peers:
        peer.writer.close()
        await asyncio.gather(peer.writer.wait_closed(), return_exceptions=True)


async def test_malformed_requests_fill_no_log(start, connect, caplog):
    gateway = await start("pd0:PD")
    for _ in range(30):
        peer = await connect(gateway)
        peer.writer.write(b"NO HTTP\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await peer.reader.read()).startswith(b"HTTP/1.1 400 ")
    assert sum("Invalid HTTP request" in line for line in caplog.messages) <= 11


async def test_an_outage_fills_no_log(start, kit, caplog):
    gateway = await start("p0:P", restart="never", startup_wait_s=0.1)
    for _ in range(15):
        assert (await gateway.error(kit.chat()))[0] == 503
    assert sum("no instance for decode" in line for line in caplog.messages) <= 11


async def test_one_connection_serves_all_kinds_of_requests(start, kit, connect):
    gateway = await start("pd0:PD")
    peer = await connect(gateway)
    stream = json.dumps({**json.loads(BODY), "stream": True}).encode()
    get = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for _ in range(2):
        assert (await peer.ask(post()))[::2] == (200, kit.WHOLE)
        assert (await peer.ask(get))[0] == 200
        assert (await peer.ask(post(stream)))[::2] == (200, kit.FIRST + kit.REST + kit.DONE)
        assert (await peer.ask(post(b"{", path="/v1/completions")))[0] == 400
        assert (await peer.ask(post(path="/nowhere")))[0] == 404
        assert (await peer.ask(post(BODY, "Expect: 100-continue")))[0] == 200
    await gateway.settle()


async def test_a_refused_body_is_read_to_its_end(start, kit, connect):
    gateway = await start("pd0:PD", max_body_bytes=1000)
    peer = await connect(gateway)
    status, _, body = await peer.ask(post(bytes(3_000_000)) + post())
    assert status == 413 and json.loads(body)["error"]["code"] == "request_too_large"
    assert (await peer.answer())[::2] == (200, kit.WHOLE)


async def test_a_client_that_leaves_before_its_answer_is_noticed(start, kit, connect):
    gateway = await start("pd0:PD")
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    peer = await connect(gateway)
    peer.writer.write(post())
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 1)
    peer.writer.close()
    async with asyncio.timeout(60):
        await gateway.until(lambda: gateway.admission.queue.num_in_flight == 0)


async def test_a_body_that_does_not_come_is_a_408(start, kit, connect, monkeypatch):
    monkeypatch.setattr("proxy.api.endpoint.BODY_S", 0.3)
    gateway = await start("pd0:PD")
    status, headers, body = await (await connect(gateway)).ask(post()[:-5])
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    [client] = gateway.admission.authenticator.holders
    assert client.num_active == 0
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_a_client_that_leaves_within_its_body_leaves_nothing(start, kit, connect):
    gateway = await start("pd0:PD")
    peer = await connect(gateway)
    peer.writer.write(post()[:-5])
    await asyncio.sleep(0.05)
    peer.writer.close()
    await gateway.until(lambda: gateway.admission.queue.num_in_flight == 0)
    assert not gateway["pd0"].got("/stage/prefill")
