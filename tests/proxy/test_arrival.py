"""Slow senders: heads and bodies have their time, and the others do not notice."""

import asyncio
import contextlib

import aiohttp
import pytest

from proxy.http.arrival import ArrivalLimits

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
FORM = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: multipart/form-data; boundary=b\r\n"
)


async def trickle(url: str, begin: bytes, drop: bytes, limit_s: float = 30.0) -> tuple[bytes, float]:
    """Send ``begin``, then ``drop`` every 20 ms; what came back until the connection closed, and when that was."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    loop = asyncio.get_running_loop()
    started = loop.time()
    writer.write(begin)

    async def keep_sending() -> None:
        with contextlib.suppress(ConnectionError):
            while drop:
                await asyncio.sleep(0.02)
                writer.write(drop)
                await writer.drain()

    sending = asyncio.create_task(keep_sending())
    answer = b""
    try:
        with contextlib.suppress(ConnectionResetError):  # the gateway closes while bytes are on their way
            async with asyncio.timeout(limit_s):
                while piece := await reader.read(4096):
                    answer += piece
    finally:
        sending.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer, loop.time() - started


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (b"", b""),
        (b"GE", b""),
        (HEAD, b"x: y\r\n"),
        (b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\nGET", b""),
    ],
    ids=["nothing", "cut", "trickling", "second"],
)
async def test_a_head_that_does_not_come_ends_its_connection(start, kit, begin, drop):
    gateway = await start("pd0:PD", header_timeout_s=0.3)
    answer, seconds = await trickle(gateway.url, begin, drop)
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'{"status":"live"}'))
    assert 0.25 < seconds < 20
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (HEAD + b"content-length: 100000\r\n\r\n{", b"  "),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n"),
        (FORM + b"transfer-encoding: chunked\r\n\r\n5\r\n--b\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["length", "chunks", "a file"],
)
async def test_a_body_that_trickles_is_a_408(start, kit, begin, drop):
    gateway = await start("pd0:PD", body_timeout_s=0.3)
    answer, seconds = await trickle(gateway.url, begin, drop)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer
    assert seconds < 20
    [client] = gateway.admission.authenticator.clients
    assert client.num_active == 0
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_requests_may_take_longer_than_their_heads(start, kit):
    for limit_s in (0.1, 1, 10):  # until heads and bodies come in time
        gateway = await start("pd0:PD", header_timeout_s=limit_s, body_timeout_s=limit_s)
        took_s = 4 * limit_s
        gateway["pd0"].scripts["/stage/prefill"] = lambda _, took_s=took_s: [took_s, kit.NONE, kit.WHOLE]
        try:
            answers = []
            for _ in range(2):
                answers.append(await gateway.answer(kit.chat()))
                await asyncio.sleep(2 * limit_s)  # an idle connection is the keep-alive timeout's business
        except aiohttp.ClientError:
            continue
        if all(status != 408 for status, _ in answers):
            break
    assert answers == [(200, kit.WHOLE)] * 2


def test_the_time_for_a_body_follows_its_length():
    limits = ArrivalLimits(header_s=20, body_s=60, min_body_rate=1000)
    assert limits.time_for_body(0) == 10
    assert limits.time_for_body(20_000) == 30
    assert limits.time_for_body(10**9) == limits.time_for_body(None) == 60
    assert "within 30 s" in limits.too_slow(20_000).message
