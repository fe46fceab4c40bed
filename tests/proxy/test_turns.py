"""Few large bodies are held in part, and none waits for a slow one for long."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http.arrival import LARGE_BYTES, Turns

FOR_EVER_S = 1e6
LARGE = json.dumps({"messages": [{"role": "user", "content": "a" * 5 * LARGE_BYTES}]}).encode()


def post(body: bytes, *headers: str) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *headers,
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def status_of(reader: asyncio.StreamReader) -> int:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.split("content-length: ")[1].split("\r")[0]))
    return int(head.split()[1])


@given(st.lists(st.tuples(st.sampled_from(["ask", "end"]), st.integers(0, 9)), max_size=60))
def test_turns_begin_in_order_while_there_is_room(steps):
    loop = asyncio.new_event_loop()
    turns = Turns(max_bytes=10, patience_s=FOR_EVER_S)
    asked, begun = [], []
    for step, number in steps:
        if step == "ask":
            asked.append(turns.ask(loop, number + 1, partial(begun.append, len(asked))))
            if asked[-1].has_begun:
                begun.append(len(asked) - 1)
        elif open_ones := [turn for turn in asked if turn is not None]:
            turn = open_ones[number % len(open_ones)]
            turn.end()
            asked[asked.index(turn)] = None
        reading = [turn.nbytes for turn in asked if turn is not None and turn.has_begun]
        assert turns.num_bytes == sum(reading)
        assert len(turns._waiting) == sum(turn is not None and not turn.has_begun for turn in asked)
        assert begun == sorted(set(begun))
        assert sum(reading[:-1]) < 10, "the last of them began when there was room"
        assert sum(reading) >= 10 or not len(turns._waiting), "nobody waits while there is room"
    loop.close()


async def test_nobody_waits_for_a_slow_one_for_long():
    turns, begun = Turns(max_bytes=1, patience_s=0.01), asyncio.Event()
    loop = asyncio.get_running_loop()
    slow = turns.ask(loop, 5, lambda: None)
    other = turns.ask(loop, 7, begun.set)
    assert slow.has_begun and not other.has_begun
    async with asyncio.timeout(300):
        await begun.wait()
    assert other.has_begun and turns.num_bytes == 12
    slow.end()
    other.end()
    assert turns.num_bytes == len(turns._waiting) == 0


@pytest.fixture
async def gateway_and_peers(start):
    """A gateway that reads one large body at a time, and two clients, the first of which is in its turn."""
    gateway = await start("pd0:PD")
    turns = gateway.app.state.turns = Turns(max_bytes=1, patience_s=FOR_EVER_S)
    host, port = gateway.url.removeprefix("http://").split(":")
    first, second = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    first[1].write(post(LARGE)[:-1])
    await gateway.until(lambda: turns.num_bytes)
    yield gateway, turns, first, second
    for _, writer in (first, second):
        writer.close()
    await gateway.until(lambda: not turns.num_bytes and not len(turns._waiting))


async def test_a_body_waits_for_its_turn(gateway_and_peers):
    gateway, turns, first, second = gateway_and_peers
    second[1].write(post(LARGE) + post(b"{}"))
    await gateway.until(lambda: len(turns._waiting))
    first[1].write(LARGE[-1:])
    async with asyncio.timeout(300):
        assert [await status_of(reader) for reader, _ in (first, second, second)] == [200, 200, 400]


async def test_what_is_refused_unread_keeps_nobody_waiting(gateway_and_peers):
    _, turns, first, second = gateway_and_peers
    second[1].write(post(LARGE, "X-Request-Id: a b") + post(b"{}"))
    async with asyncio.timeout(300):
        assert [await status_of(second[0]) for _ in range(2)] == [400, 400]
        assert not len(turns._waiting)
        first[1].write(LARGE[-1:])
        assert await status_of(first[0]) == 200


async def test_who_leaves_in_turn_lets_the_next_one_read(gateway_and_peers):
    gateway, turns, first, second = gateway_and_peers
    second[1].write(post(LARGE))
    await gateway.until(lambda: len(turns._waiting))
    first[1].close()
    async with asyncio.timeout(300):
        assert await status_of(second[0]) == 200


async def test_who_waits_in_the_queue_holds_up_no_body(gateway_and_peers):
    gateway, turns, first, _ = gateway_and_peers
    gateway.admission.queue.resize(0, 10, 0.0)
    first[1].write(LARGE[-1:])
    await gateway.until(lambda: gateway.admission.queue.num_waiting)
    assert not turns.num_bytes
    gateway.admission.queue.resize(10, 10, 0.0)
    async with asyncio.timeout(300):
        assert await status_of(first[0]) == 200
