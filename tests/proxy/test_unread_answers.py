"""Clients that do not read what they asked for, and answers whose end and failure meet."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from epd_serve.rpc import items

BODY = {"messages": [{"role": "user", "content": "hello"}]}


def post(stream=False, **fields):
    body = json.dumps({**BODY, **fields, "stream": stream}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


@pytest.fixture
async def connect():
    """``connect(gateway)`` → a socket that holds little of what comes."""
    sockets = []

    async def open_one(gateway):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        sockets.append(one)
        host, port = gateway.url.removeprefix("http://").split(":")
        await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
        return one

    yield open_one
    for one in sockets:
        one.close()


async def read(one, end=None, times=1):
    """All that comes until the connection's end, or until a moment after ``end`` has come so many times."""
    data = bytearray()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    try:
        while True:
            is_whole = end is not None and data.endswith(end) and data.count(end) >= times
            async with asyncio.timeout(0.3 if is_whole else 20):
                piece = await asyncio.get_running_loop().sock_recv(one, 1 << 20)
            if not piece:
                return bytes(data)
            data += piece
    except (TimeoutError, ConnectionError):
        return bytes(data)


def is_empty(gateway):
    return not gateway.admission.queue.num_in_flight and not any(
        client.num_active for client in gateway.admission.authenticator.holders
    )


async def test_an_unread_stream_gives_its_place_back_at_its_time_limit(start, kit, connect):
    gateway = await start("pd0:PD", request_timeout_s=0.5)
    event = b"data: " + b"x" * 60_000 + b"\n\n"
    gateway["pd0"].scripts["/stage/prefill"] = lambda message: [kit.NONE, *[event] * 400, kit.DONE]
    peer = await connect(gateway)
    await asyncio.get_running_loop().sock_sendall(peer, post(True))
    await gateway.until(lambda: gateway["pd0"].got("/stage/prefill"))
    await gateway.until(lambda: is_empty(gateway))


async def test_an_unread_answer_is_not_followed_by_another(start, kit, connect):
    gateway = await start("pd0:PD", request_timeout_s=5.0)
    whole = b'{"x":"' + b"x" * 5_000_000 + b'"}'
    gateway["pd0"].scripts["/stage/prefill"] = lambda message: [kit.NONE, whole]
    peer = await connect(gateway)
    await asyncio.get_running_loop().sock_sendall(peer, post())
    await gateway.until(lambda: gateway["pd0"].got("/stage/prefill"))
    await gateway.until(lambda: is_empty(gateway))  # at once, or with an error behind the answer at the time limit
    answer = await read(peer, whole)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(whole)


async def test_a_late_reader_receives_the_error_of_its_stream(start, kit, connect):
    gateway = await start("pd0:PD", request_timeout_s=0.5)
    event = b"data: " + b"x" * 60_000 + b"\n\n"
    gateway["pd0"].scripts["/stage/prefill"] = lambda message: [kit.NONE, *[event] * 50, kit.FOREVER]
    peer = await connect(gateway)
    await asyncio.get_running_loop().sock_sendall(peer, post(True))
    await asyncio.sleep(1.0)
    answer = await read(peer)
    assert b"took longer than 0.5 s" in answer and not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("end", ["die", "forever"])
async def test_failures_after_the_end_of_a_stream_are_ignored(start, kit, end):
    gateway = await start("pd0:PD", "pd1:PD", request_timeout_s=2.0)
    for fake in gateway.fakes.values():
        fake.scripts["/stage/prefill"] = lambda message: [
            kit.FRAMES,
            kit.frame(1) + kit.frame(0, end=True),
            0.05,
            end,
        ]
    answer = await gateway.raw({**BODY, "stream": True})
    assert answer.count(b"[DONE]") == 1 and answer.endswith(b"0\r\n\r\n") and b"error" not in answer
    assert sum(len(fake.got("/stage/prefill")) for fake in gateway.fakes.values()) == 1
    await gateway.settle()
    assert is_empty(gateway)


async def test_several_choices_cannot_continue_from_tokens(start, kit):
    """A token whose text is held back begins no answer: the next attempt begins anew."""
    gateway = await start("pd0:PD", "pd1:PD", "pd2:PD")
    asked = []

    def script(message):
        asked.append(message.generated)
        if len(asked) == 1:
            return [kit.FRAMES, items.pack(0, (7,), b""), 0.05, kit.DIE]
        return [kit.FRAMES, kit.frame(1) + kit.frame(0, end=True)]

    for fake in gateway.fakes.values():
        fake.scripts["/stage/prefill"] = script
    await gateway.answer({**BODY, "stream": True, "n": 2})
    assert asked == [[], []]
