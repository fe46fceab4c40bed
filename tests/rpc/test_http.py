"""Stage calls over the raw client, against a server that answers what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from epd_serve.errors import InstanceLost, InvalidRequest, Unavailable
from epd_serve.rpc.admin import AdminClient, AdminUnreachable
from epd_serve.rpc.http import HttpCall, HttpPool

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with the next of ``answers``: pieces, of which None closes the connection."""

    def __init__(self) -> None:
        self.answers: list[list[bytes | None]] = []
        self.num_connections = self.num_lost = 0
        self.requests: list[bytes] = []

    async def serve(self, reader, writer) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_lost += 1
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    played = Server()
    listening = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    played.pool = HttpPool("p0", f"http://127.0.0.1:{port}/")
    yield played
    await played.pool.close()
    listening.close()


def sent(server: Server, body: bytes = b"") -> HttpCall:
    call = HttpCall(server.pool, "POST", "/stage", "x: y\r\n", [body])
    call.send()
    return call


async def test_connections_are_used_again(server):
    server.answers = [[OK], [CHUNKED + b"3\r\nabc\r\n", b"1\r", b"\nd\r\n0\r\n\r\n"], [OK[:20], OK[20:]]]
    assert [await _whole(sent(server, b"body")) for _ in range(3)] == [b"hi", b"abcd", b"hi"]
    assert server.num_connections == 1
    assert server.requests[0].endswith(b"x: y\r\ncontent-length: 4\r\n\r\nbody")


async def _whole(call: HttpCall) -> bytes:
    try:
        async with asyncio.timeout(300):
            await call.opened
            return await call.read()
    finally:
        call.close()


@pytest.mark.parametrize(
    "answer",
    [
        [None],
        [OK[:10], None],
        [OK[:-1], None],
        [CHUNKED + b"3\r\nab", None],
        [CHUNKED + b"3\r\nabc\r\n", None],
        [b"nonsense\r\n\r\n"],
        [CHUNKED + b"zz\r\n"],
        [b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000],
        [b"HTTP/1.1 200 OK\r\n\r\nno end", None],
    ],
    ids=range(9),
)
async def test_half_and_wrong_answers_are_a_lost_instance(server, answer):
    server.answers = [answer, [OK]]
    with pytest.raises(InstanceLost, match="p0"):
        await _whole(sent(server))
    assert await _whole(sent(server)) == b"hi"
    assert server.num_connections == 2


async def test_an_error_is_the_instances_own(server):
    body = b'{"error":{"message":"no such thing","type":"t"}}'
    server.answers = [[b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n" % len(body), body]]
    with pytest.raises(InvalidRequest, match="no such thing"):
        await _whole(sent(server))


async def test_closing_a_call_closes_its_connection(server):
    server.answers = [[CHUNKED, b"1\r\na\r\n", *[b""] * 100], [OK]]
    call = sent(server)
    await call.opened
    call.close()
    call.close()
    assert await _whole(sent(server)) == b"hi"
    assert server.num_connections == 2


async def test_a_call_may_be_closed_before_it_is_connected(server):
    call = sent(server)
    call.close()
    assert call.opened.cancelled()


async def test_a_closed_idle_connection_is_not_used(server):
    server.answers = [[OK, None], [OK]]
    assert await _whole(sent(server)) == b"hi"
    async with asyncio.timeout(300):
        while server.pool._idle:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert await _whole(sent(server)) == b"hi"


async def test_an_answer_is_forwarded_as_far_as_it_may(server):
    server.answers = [[CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n", b"1\r\nc\r\n0\r\n\r\n"]]
    call = sent(server)
    await call.opened
    got: list[bytes] = []

    def write(data: bytes) -> bool:
        got.append(data)
        return len(got) != 1

    assert not await call.forward(write)
    assert b"".join(got) == b"a"
    await asyncio.sleep(0.05)
    while not await call.forward(write):
        pass
    assert b"".join(got) == b"abc"
    call.close()


async def test_what_the_writer_raises_ends_the_forwarding(server):
    server.answers = [[CHUNKED, b"1\r\na\r\n", *[b""] * 10]]
    call = sent(server)
    await call.opened

    def write(data: bytes) -> bool:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        await call.forward(write)
    call.close()


async def test_what_nobody_reads_makes_the_instance_wait(server):
    piece = b"10000\r\n" + bytes(65536) + b"\r\n"
    server.answers = [[CHUNKED, *[piece] * 300, b"0\r\n\r\n"], [OK]]
    call = sent(server)
    await call.opened
    await asyncio.sleep(0.3)
    assert call._unread_bytes < 4 * 1024 * 1024
    assert len(await call.read()) == 300 * 65536
    call.close()
    assert await _whole(sent(server)) == b"hi"
    assert server.num_connections == 1


async def test_an_answer_without_end_is_not_collected(server):
    piece = b"10000\r\n" + bytes(65536) + b"\r\n"
    server.answers = [[CHUNKED, *[piece] * 200], [OK]]
    call = HttpCall(server.pool, "GET", "/info")
    with pytest.raises(InstanceLost, match="answered with more than 100000 bytes"):
        async with asyncio.timeout(300):
            await call.ask(100_000)
    assert not call._pieces
    assert await _whole(sent(server)) == b"hi"


@pytest.mark.parametrize("ends", [True, False])
async def test_an_error_without_end_is_an_error_all_the_same(server, ends):
    piece = b"10000\r\n" + b"e" * 65536 + b"\r\n"
    head = b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n"
    server.answers = [[head, *[piece] * (6 if ends else 200), b"0\r\n\r\n"], [OK]]
    with pytest.raises(Unavailable, match="p0 answered 503: eeee") as caught:
        await _whole(sent(server))
    assert len(caught.value.message) < 300
    assert await _whole(sent(server)) == b"hi"


async def test_no_instance_at_all():
    pool = HttpPool("p0", "http://127.0.0.1:1")
    call = HttpCall(pool, "GET", "/info")
    call.send()
    with pytest.raises(InstanceLost, match=r"instance p0 at .* is not reachable"):
        await call.opened
    call.close()
    await pool.close()
    with pytest.raises(ValueError, match="should look like"):
        HttpPool("p0", "10.0.0.1:9000")


async def test_one_timer_closes_idle_connections_however_often_there_is_none(server, monkeypatch):
    monkeypatch.setattr("epd_serve.rpc.http.KEEP_ALIVE_S", 1.0)
    num_looks, close_old = 0, HttpPool._close_old

    def look(pool):
        nonlocal num_looks
        num_looks += 1
        close_old(pool)

    monkeypatch.setattr(HttpPool, "_close_old", look)
    server.answers = [[OK] for _ in range(10)]
    for _ in range(10):
        await _whole(sent(server))
    async with asyncio.timeout(300):
        while not server.num_lost:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert num_looks <= 6 and server.num_lost == server.num_connections == 1


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_calls_that_are_given_up_while_they_connect_keep_no_pool_open(loop_factory) -> None:
    async def scenario() -> None:
        played = Server()
        listening = await asyncio.start_server(played.serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        for num_turns in range(12):  # of the event loop, before the call is given up
            for _ in range(10):
                pool = HttpPool("p0", f"http://127.0.0.1:{port}/")
                call = HttpCall(pool, "POST", "/stage")
                call.send()
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                call.close()
                async with asyncio.timeout(300):
                    await pool.close()
        listening.close()
        async with asyncio.timeout(300):
            while len(asyncio.all_tasks()) > 1:  # the server's side of what was accepted  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


async def test_a_host_that_is_no_name_is_no_instance() -> None:
    for url in ("http://a..b:8000", f"http://{'a' * 70}:8000"):
        async with HttpPool("p0", url) as pool:
            call = HttpCall(pool, "GET", "/health", "", [b""])
            async with asyncio.timeout(5):
                with pytest.raises(InstanceLost):
                    await call.ask()


@pytest.mark.parametrize("url", ["localhost:9001", "http://localhost:99999", "admin"])
async def test_the_admin_api_is_asked_at_a_url(url: str) -> None:
    with pytest.raises(AdminUnreachable, match="is no URL of an admin API"):
        await AdminClient(url).ask("GET", "/instances")
