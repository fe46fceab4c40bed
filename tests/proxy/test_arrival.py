"""Slow senders: a body has its time, and the others do not notice."""

import asyncio
import contextlib

import pytest

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
        (HEAD + b"content-length: 100000\r\n\r\n{", b"  "),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n"),
        (FORM + b"transfer-encoding: chunked\r\n\r\n5\r\n--b\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["length", "chunks", "a file"],
)
async def test_a_body_that_trickles_is_a_408(start, kit, monkeypatch, begin, drop):
    monkeypatch.setattr("proxy.api.endpoint.BODY_S", 0.3)
    gateway = await start("pd0:PD")
    answer, seconds = await trickle(gateway.url, begin, drop)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer
    assert seconds < 20
    [client] = gateway.admission.authenticator.clients
    assert client.num_active == 0
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
