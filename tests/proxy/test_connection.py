"""Requests over plain connections: in pieces, ahead of answers, unfinished, unread."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from garbage import garbage

from epd_serve.telemetry.span import join_trace
from proxy.http.client import Client
from proxy.observe.record import RequestRecord
from proxy.tasks import Interruption

BODY = {"messages": [{"role": "user", "content": "hello"}]}
STREAM = {**BODY, "stream": True}


async def ask(peer, data):
    """(status, headers, body) of the answer to these bytes; the body without chunk framing."""
    reader, writer = peer
    writer.write(data)
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        if head[0].split()[1] in ("100", "102"):
            return await ask(peer, b"")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
    return int(head[0].split()[1]), headers, body


def is_empty(gateway):
    holders = gateway.admission.authenticator.holders
    return not gateway.admission.queue.num_in_flight and not any(one.num_active for one in holders)


async def test_the_end_of_a_stream_is_no_departure():
    """uvicorn reports a disconnect once an answer is complete, while the gateway still closes its calls."""
    messages, complete = iter([{"type": "http.request", "body": b"{}"}]), asyncio.Event()

    async def receive():
        if (message := next(messages, None)) is not None:
            return message
        await complete.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if not message.get("more_body", True):
            complete.set()

    client = Client({}, receive, send, RequestRecord("chat", join_trace(), "r", time.monotonic()))
    with Interruption(client.loop) as client.running:
        await client.body(100)
        client.start([])
        client.write(b"data: [DONE]\n\n", last=True)
        await client.drain()
        await asyncio.sleep(0.01)
    client.close()


async def test_one_connection_serves_all_kinds_of_requests(start, kit):
    gateway = await start("pd0:PD")
    async with gateway.connection() as peer:
        for _ in range(2):
            assert (await ask(peer, kit.post(BODY)))[::2] == (200, kit.WHOLE)
            assert (await ask(peer, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 200
            assert (await ask(peer, kit.post(STREAM)))[::2] == (200, kit.FIRST + kit.REST + kit.DONE)
            assert (await ask(peer, kit.post(b"{", path="/v1/completions")))[0] == 400
            assert (await ask(peer, kit.post(BODY, path="/nowhere")))[0] == 404
            assert (await ask(peer, kit.post(BODY, "expect: 100-continue")))[0] == 200
    await gateway.settle()


@pytest.mark.parametrize(
    ("second", "fields", "status"),
    [("", {"stream": True}, 200), ("", {}, 200), ("", {"n": 0}, 400), ("data:image/png;base64,AAAA", {}, 400)],
)
async def test_a_finished_request_leaves_no_reference_cycle(start, kit, second, fields, status):
    """A collection of what 600 requests left stopped all streams for 75 ms; media would stay until then."""
    gateway = await start("e0:E", "p0:P", "d0:D")
    gateway["e0"].scripts["/stage/encode"] = lambda _: [kit.FOREVER]  # its call is cancelled after the answer
    chat = kit.chat(kit.data_url(kit.picture()), second or kit.data_url(kit.picture(9, 9)), **fields)
    assert (await gateway.answer(chat))[0] == status
    await gateway.settle()
    left = await garbage_of(gateway, lambda: gateway.answer(chat))
    assert not left & {"Client", "RequestRecord", "Job", "_Attempt", "_StageCall", "Interruption"}


async def garbage_of(gateway, ask):
    """Names of the types of what a request leaves to the garbage collector."""
    with garbage() as left:
        await ask()
        await gateway.settle()
    return left


@pytest.mark.parametrize("how", ["fails", "breaks off", "is too slow", "is left", "is tried again"])
async def test_a_request_that_fails_leaves_nothing_of_its_media(start, kit, how):
    gateway = await start("e0:E", "p0:P", "p1:P", "d0:D", restart="never", request_timeout_s=2.0)
    gateway["e0"].scripts["/stage/encode"] = lambda _: [kit.FOREVER]
    cut = [kit.NONE, kit.sent(kit.FIRST), kit.DIE]
    script = {"is too slow": [kit.FOREVER], "is left": [kit.FOREVER], "breaks off": cut}
    for name in ("p0",) if how == "is tried again" else ("p0", "p1"):
        gateway[name].scripts["/stage/prefill"] = lambda _: script.get(how) or kit.fail(500, "broken")
    chat = kit.chat(kit.data_url(kit.picture()), stream=how == "breaks off", n=1 + (how == "breaks off"))

    async def ask():
        asking = asyncio.create_task(gateway.answer(chat))
        if how == "is left":
            await gateway.until(lambda: gateway["p0"].got("/stage/prefill") or gateway["p1"].got("/stage/prefill"))
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await gateway.until(lambda: is_empty(gateway))

    assert not await garbage_of(gateway, ask) & {"Job", "MediaItem", "_Attempt", "_StageCall"}


async def test_a_refused_body_is_read_to_its_end(start, kit):
    gateway = await start("pd0:PD", max_body_bytes=1000)
    async with gateway.connection() as peer:
        status, _, body = await ask(peer, kit.post(bytes(3_000_000)) + kit.post(BODY))
        assert status == 413 and json.loads(body)["error"]["code"] == "request_too_large"
        assert (await ask(peer, b""))[::2] == (200, kit.WHOLE)


@pytest.mark.parametrize("num_bytes", [None, -5])
async def test_a_client_that_leaves_is_noticed(start, kit, num_bytes):
    """Before its answer, and within its body."""
    gateway = await start("pd0:PD")
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    [client] = gateway.admission.authenticator.holders
    async with gateway.connection() as (_, writer):
        writer.write(kit.post(BODY)[:num_bytes])
        await gateway.until(lambda: gateway["pd0"].calls if num_bytes is None else client.num_active)
    await gateway.until(lambda: is_empty(gateway))
    assert len(gateway["pd0"].got("/stage/prefill")) == (num_bytes is None)


async def test_a_body_that_does_not_come_is_a_408(start, kit, monkeypatch):
    monkeypatch.setattr("proxy.api.endpoint.BODY_S", 0.3)
    gateway = await start("pd0:PD")
    async with gateway.connection() as peer:
        status, headers, body = await ask(peer, kit.post(BODY)[:-5])
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert is_empty(gateway) and await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def read(one, end=None):
    """All that comes until the connection's end, or until nothing follows ``end`` for a moment."""
    data = bytearray()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            async with asyncio.timeout(0.3 if end is not None and data.endswith(end) else 60):
                piece = await asyncio.get_running_loop().sock_recv(one, 1 << 20)
            if not piece:
                break
            data += piece
    return bytes(data)


EVENT = b"data: " + b"x" * 60_000 + b"\n\n"


async def test_an_unread_stream_gives_its_place_back_at_its_time_limit(start, kit):
    gateway = await start("pd0:PD", request_timeout_s=0.5)
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, *[kit.sent(EVENT)] * 400, kit.sent(kit.DONE)]
    async with gateway.unread(STREAM):
        await gateway.until(lambda: gateway["pd0"].got("/stage/prefill"))
        await gateway.until(lambda: is_empty(gateway))


async def test_an_unread_answer_is_not_followed_by_another(start, kit):
    gateway = await start("pd0:PD", request_timeout_s=5.0)
    whole = b'{"x":"' + b"x" * 5_000_000 + b'"}'
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, whole]
    async with gateway.unread(BODY) as peer:
        await gateway.until(lambda: gateway["pd0"].got("/stage/prefill"))
        await gateway.until(lambda: is_empty(gateway))  # at once, or with an error behind the answer at the limit
        answer = await read(peer, whole)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(whole)


async def test_a_late_reader_receives_the_error_of_its_stream(start, kit):
    gateway = await start("pd0:PD", request_timeout_s=0.5)
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, *[kit.sent(EVENT)] * 50, kit.FOREVER]
    async with gateway.unread(STREAM) as peer:
        await gateway.until(lambda: gateway["pd0"].cancelled)
        answer = await read(peer)
    assert b'"timeout_error"' in answer and not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("end", ["die", "forever"])
async def test_failures_after_the_end_of_a_stream_are_ignored(start, kit, end):
    gateway = await start("pd0:PD", "pd1:PD", request_timeout_s=2.0)
    script = [kit.FRAMES, kit.frame(1) + kit.frame(0, end=True), 0.05, end]
    for fake in gateway.fakes.values():
        fake.scripts["/stage/prefill"] = lambda _: script
    answer = await gateway.raw(STREAM)
    assert answer.count(b"[DONE]") == 1 and answer.endswith(b"0\r\n\r\n") and b"error" not in answer
    assert sum(len(fake.got("/stage/prefill")) for fake in gateway.fakes.values()) == 1
    await gateway.settle()
    assert is_empty(gateway)
