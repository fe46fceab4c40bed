"""Many calls over one connection: each has an answer, a pace and an end of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from servers import served

from epd_serve.errors import InstanceLost, InstanceUnreachable, InstanceUntrusted, InvalidRequest, TooLarge
from epd_serve.launch.processes.ports import free_port
from epd_serve.rpc import streams
from epd_serve.rpc.http import HttpPool
from epd_serve.rpc.link import pack
from epd_serve.rpc.streams import (
    BrokenStream,
    Call,
    Cancel,
    Credit,
    Data,
    End,
    Head,
    StreamCall,
    Streams,
    StreamServer,
    UpgradableHttp,
    upgrade,
)

SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: epd-streams/1\r\n\r\n"
MIB = 1 << 20


class App:
    """Answers a call by its path. ``cancelled`` are the paths of calls whose callers left; ``sent`` are bytes."""

    def __init__(self) -> None:
        self.connections: set[StreamServer] = set()
        self.num_connections = 0
        self.cancelled: list[str] = []
        self.sent: dict[str, int] = {}
        self.go_on = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        path = scope["path"]
        if path == streams.PATH:
            self.num_connections += 1
            assert upgrade(scope, self)
            return
        body = (await receive())["body"]
        play = asyncio.create_task(self._play(path, body, send))
        gone = asyncio.create_task(receive())
        await asyncio.wait({play, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not play.done():
            self.cancelled.append(path)
            play.cancel()
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await play

    async def _play(self, path: str, body: bytes, send) -> None:
        async def say(data: bytes, *, last: bool = False) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            self.sent[path] = self.sent.get(path, 0) + len(data)

        status = 400 if path == "/wrong" else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-path", path.encode())]})
        if path == "/wrong":
            await say(b'{"error":{"message":"no such thing","type":"t"}}', last=True)
        elif path == "/tokens":
            for number in range(20):
                await say(b"%d " % number)
                await asyncio.sleep(0.002)
            await say(b"", last=True)
        elif path == "/much":
            for number in range(80):
                await say(bytes([number]) * (128 * 1024))
                await asyncio.sleep(0)
            await say(b"", last=True)
        elif path == "/broken":
            await say(b"half")
            raise BrokenStream("as it must")
        elif path == "/fault":
            raise RuntimeError("a fault")
        elif path == "/wait":
            await say(b"first")
            await self.go_on.wait()
            await say(b"last", last=True)
        else:
            await say(body, last=True)


@pytest.fixture
async def app() -> App:
    return App()


@pytest.fixture
async def server(app: App) -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(
        app, port=0, lifespan="off", log_config=None, http=UpgradableHttp, timeout_graceful_shutdown=1
    )
    made = uvicorn.Server(config)
    async with served(made):
        yield made


@pytest.fixture
async def to(server: uvicorn.Server) -> AsyncIterator[Streams]:
    async with reaching(server.servers[0].sockets[0].getsockname()[1]) as made:
        yield made


@contextlib.asynccontextmanager
async def reaching(port: int) -> AsyncIterator[Streams]:
    async with HttpPool("p0", f"http://127.0.0.1:{port}") as pool:
        made = Streams(pool)
        try:
            yield made
        finally:
            await made.close()


def sent(to: Streams, path: str, body: bytes = b"") -> StreamCall:
    call = StreamCall(to, path, [(b"a", b"b")], body)
    to.send(call)
    return call


async def whole(call: StreamCall) -> bytes:
    try:
        await call.opened
        return await call.read()
    finally:
        call.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_calls_at_once_share_a_connection_and_each_has_its_answer(app: App, to: Streams) -> None:
    bodies = [b"%d" % number * 1000 for number in range(50)]
    answers = await asyncio.gather(*[whole(sent(to, f"/echo/{i}", body)) for i, body in enumerate(bodies)])
    assert answers == bodies
    tokens = b"".join(b"%d " % number for number in range(20))
    assert await asyncio.gather(*[whole(sent(to, "/tokens")) for _ in range(20)]) == [tokens] * 20
    assert app.num_connections == 1


async def test_the_tokens_of_a_step_come_in_one_list(app: App, to: Streams, monkeypatch) -> None:
    taken: list[int] = []
    take = streams.Messages.take

    def noted(self: streams.Messages[Any], piece: bytes) -> list[Any]:
        lists = take(self, piece)
        taken.extend(map(len, lists))
        return lists

    monkeypatch.setattr(streams.Messages, "take", noted)
    calls = [sent(to, "/wait") for _ in range(30)]
    for call in calls:
        assert await anext(call) == b"first"
    taken.clear()
    app.go_on.set()
    assert [await call.read() for call in calls] == [b"last"] * 30
    assert max(taken) >= 30, "one pass of the server's loop makes one list"
    for call in calls:
        call.close()


async def test_what_comes_of_a_stream_with_one_read_is_one_piece() -> None:
    messages = [[0, 1, 200, []], [1, 1, b"a"], [1, 1, b"b"]]
    async with saying(SWITCHING, told(*messages) + told([1, 1, b"c"]) + told([1, 1, b"d"], [2, 1])) as to:
        call, pieces = sent(to, "/tokens"), list[bytes]()
        await call.opened
        while not await call.forward(lambda data: pieces.append(data) or True):
            pass
        call.close()
    assert pieces == [b"abcd"]


async def test_an_error_is_the_servers_own(to: Streams) -> None:
    with pytest.raises(InvalidRequest, match="no such thing"):
        await whole(sent(to, "/wrong"))
    assert await whole(sent(to, "/echo", b"x")) == b"x"


@pytest.mark.parametrize(("path", "got"), [("/broken", b"half"), ("/fault", b"")])
async def test_an_answer_that_is_cut_off_is_the_only_one(app: App, to: Streams, path: str, got: bytes) -> None:
    other = sent(to, "/wait")
    await other.opened
    call, found = sent(to, path), b""
    await call.opened
    with pytest.raises(InstanceLost, match="broke off its answer"):
        async for chunk in call.chunks():
            found += chunk
    call.close()
    app.go_on.set()
    assert (found, await whole(other), app.num_connections) == (got, b"firstlast", 1)


async def test_a_slow_reader_stops_its_own_stream_alone(app: App, to: Streams) -> None:
    slow = sent(to, "/much")
    await slow.opened
    for _ in range(3):
        assert len(await whole(sent(to, "/much"))) == 10 * MIB
    await asyncio.sleep(0.05)
    assert slow._unread_bytes <= streams.WINDOW_BYTES
    assert app.sent["/much"] <= 3 * 10 * MIB + streams.WINDOW_BYTES + 128 * 1024
    got: list[bytes] = []

    def write(data: bytes) -> bool:
        got.append(data)
        return len(got) % 3 != 0  # its client takes some, and then has to be waited for

    while not await slow.forward(write):
        pass
    slow.close()
    assert b"".join(got) == b"".join(bytes([number]) * (128 * 1024) for number in range(80))


async def test_a_call_that_is_closed_ends_alone(app: App, to: Streams) -> None:
    one, other, unread = sent(to, "/wait"), sent(to, "/wait"), sent(to, "/much")
    await one.opened
    await unread.opened
    one.close()
    one.close()
    unread.close()
    await until(lambda: len(app.cancelled) == 2)
    assert sorted(app.cancelled) == ["/much", "/wait"]
    app.go_on.set()
    assert await whole(other) == b"firstlast"
    closed_early = sent(to, "/echo")
    closed_early.close()
    assert closed_early.opened.cancelled() and app.num_connections == 1


async def test_a_connection_ends_with_its_streams_and_the_next_call_makes_another(app: App, to: Streams) -> None:
    calls = [sent(to, "/wait") for _ in range(10)]
    for call in calls:
        await call.opened
    assert to._connection is not None
    to._connection.transport.abort()  # as where a process is killed
    for call in calls:
        with pytest.raises(InstanceLost, match="broke off"):
            await whole(call)
    await until(lambda: len(app.cancelled) == 10)
    assert await whole(sent(to, "/echo", b"x")) == b"x"
    assert app.num_connections == 2


async def test_a_server_that_is_not_there_is_told_as_over_http() -> None:
    async with reaching(free_port("127.0.0.1")) as to:
        for _ in range(2):
            with pytest.raises(InstanceUnreachable) as caught:
                await whole(sent(to, "/echo"))
            assert caught.value.is_refused


async def test_a_server_that_stops_answers_what_it_has(app: App, server: uvicorn.Server, to: Streams) -> None:
    open_one = sent(to, "/wait")
    await open_one.opened
    [connection] = server.server_state.connections
    connection.shutdown()
    with pytest.raises(InstanceLost):
        await whole(sent(to, "/echo"))
    app.go_on.set()
    assert await whole(open_one) == b"firstlast"
    await until(lambda: not server.server_state.connections)


async def test_a_connection_without_calls_is_closed(
    app: App, server: uvicorn.Server, to: Streams, monkeypatch
) -> None:
    monkeypatch.setattr(streams, "IDLE_S", 0.05)
    call = sent(to, "/wait")
    await call.opened
    await asyncio.sleep(0.2)
    app.go_on.set()
    assert await whole(call) == b"firstlast"
    await until(lambda: not server.server_state.connections)
    assert await whole(sent(to, "/echo", b"x")) == b"x"
    assert app.num_connections == 2


async def test_a_call_that_is_too_long_is_refused(to: Streams, monkeypatch) -> None:
    assert await whole(sent(to, "/echo", b"x")) == b"x"
    monkeypatch.setattr(streams, "MAX_CALL_BYTES", 1000)
    with pytest.raises(TooLarge, match="1000 bytes"):
        await whole(sent(to, "/echo", bytes(1000)))
    assert await whole(sent(to, "/echo", b"x")) == b"x"


@contextlib.asynccontextmanager
async def saying(answer: bytes, then: bytes = b"") -> AsyncIterator[Streams]:
    """A server that answers the upgrade with ``answer``, and the first call with ``then``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await reader.read(65536)
            writer.write(then)
            await writer.drain()
            if then:
                await reader.read(65536)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening, reaching(listening.sockets[0].getsockname()[1]) as to:
        yield to


def told(*messages: object) -> bytes:
    return bytes(pack(list(messages)))


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (b"\xff\xff\xff\x7f", "2147483647 bytes"),
        (b"\x03\x00\x00\x00abc", "cannot be read"),
        (told([9, 1]), "cannot be read"),
        (told([1, 1]), "cannot be read"),
        (told([1, 1, "text"]), "cannot be read"),
        (told([0, 1, 200, []]) + told(*[[1, 1, bytes(100_000)]] * 3), "more than its reader has room for"),
        (b"", "closed"),
    ],
)
async def test_a_server_that_sends_what_it_may_not_is_lost(then: bytes, why: str) -> None:
    async with saying(SWITCHING, then) as to:
        call = sent(to, "/much")
        with pytest.raises(InstanceLost, match=why):
            await call.opened
            await asyncio.sleep(0.1)
            await call.read()
        call.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 426 Upgrade Required\r\ncontent-length: 60\r\n\r\n"
        b'{"error":{"message":"this instance speaks x/2","type":"t"}}\n',
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
    ],
)
async def test_a_server_of_another_version_is_told_apart_from_a_dead_one(answer: bytes) -> None:
    async with saying(answer) as to:
        with pytest.raises(InstanceUntrusted, match=r"does not speak epd-streams/1: it has another version"):
            await whole(sent(to, "/echo"))


async def test_a_caller_of_another_version_is_refused_by_name(server: uvicorn.Server) -> None:
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"GET /streams HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: epd-streams/9\r\n\r\n"
    writer.write(head)
    assert b"101" not in (await reader.read())
    writer.close()


async def raw(server: uvicorn.Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    writer.write(b"GET /streams HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: epd-streams/1\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == SWITCHING
    return reader, writer


CALL = Call(1, "/wait", [], b"")


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        b"POST /stage/prefill HTTP/1.1\r\n\r\n",
        told([7, 1]),
        told([0, 1, "/wait", []]),
        told(CALL, CALL),
        told(CALL, Credit(1, 1)),
    ],
)
async def test_a_caller_that_sends_what_it_may_not_is_cut_off_with_its_calls(
    app: App, server: uvicorn.Server, to: Streams, said: bytes
) -> None:
    other = sent(to, "/wait")
    await other.opened
    reader, writer = await raw(server)
    writer.write(told(Call(1, "/wait", [], b"")) if said != told(CALL, CALL) else b"")
    writer.write(said)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            await reader.read()
    writer.close()
    await until(lambda: len(server.server_state.connections) == 1)
    app.go_on.set()
    assert await whole(other) == b"firstlast"


async def test_what_is_said_of_calls_that_are_over_changes_nothing(app: App, server: uvicorn.Server) -> None:
    reader, writer = await raw(server)
    writer.write(told(Cancel(5), Credit(6, 10), Call(7, "/echo", [], b"x"), Cancel(3)))
    expected = told(Head(7, 200, [(b"x-path", b"/echo")]), Data(7, b"x"), End(7))
    assert await reader.readexactly(len(expected)) == expected
    writer.close()


def test_all_of_it_works_on_uvloop_with_a_key() -> None:
    """As instances and gateways run it; the proof is asked for once."""

    async def scenario() -> None:
        from epd_serve.instance.http import ControlHttp, Reply, control_server_app

        async def answer(body: bytes) -> Reply:
            return Reply(body=body * 100_000)

        app = control_server_app([("POST", "/echo", answer)], "key-of-the-deployment", lambda: "")
        config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, http=ControlHttp)
        async with served(uvicorn.Server(config)) as url:
            for key, works in (("key-of-the-deployment", True), ("another-key-than-that", False), (None, False)):
                async with HttpPool("p0", url, key) as pool:
                    to = Streams(pool)
                    calls = [sent(to, "/echo", b"abcdefgh") for _ in range(5)]
                    for call in calls:
                        if works:
                            assert len(await whole(call)) == 800_000
                        else:
                            with pytest.raises(Exception, match="cluster_key"):
                                await whole(call)
                    await to.close()

    uvloop.run(scenario())


async def test_pieces_go_out_as_they_are_put_and_wait_for_their_own_reader_alone() -> None:
    from epd_serve.instance.http import ControlHttp, Pieces, Reply, control_server_app
    from epd_serve.rpc.http import HttpCall

    much = [bytes([number]) * (MIB // 8) for number in range(8)]
    made: list[Pieces] = []

    async def answer(body: bytes) -> Reply:
        pieces = Pieces()
        made.append(pieces)
        pieces.put(b"first")
        return Reply(stream=pieces, body=b"behind")

    config = uvicorn.Config(
        control_server_app([("POST", "/answer", answer)], None, lambda: ""),
        port=0,
        lifespan="off",
        log_config=None,
        http=ControlHttp,
    )
    async with served(uvicorn.Server(config)) as url, HttpPool("p0", url) as pool:
        to = Streams(pool)
        slow, quick, cut = [sent(to, "/answer") for _ in range(3)]
        for call in (slow, quick, cut):
            await call.opened
        await until(lambda: len(made) == 3)
        for piece in much:
            made[0].put(piece)
        made[0].end()
        made[1].put(b"second")
        made[1].end()
        made[2].end(BrokenStream("as it must"))
        assert await whole(quick) == b"firstsecondbehind"
        with pytest.raises(InstanceLost):
            await whole(cut)
        assert sum(map(len, slow._pieces)) < 2 * streams.WINDOW_BYTES
        assert await whole(slow) == b"".join([b"first", *much, b"behind"])
        asked = asyncio.create_task(HttpCall(pool, "POST", "/answer", "", [b""]).ask())
        await until(lambda: len(made) == 4)
        made[3].put(b"second")
        made[3].end()
        assert await asked == b"firstsecondbehind"
        await to.close()
