"""Many calls over one connection: each has an answer, a pace and an end of its own."""

import asyncio
import contextlib
import gc
import os
import select
import socket
import struct
from functools import partial
from typing import Any

import pytest
import uvloop
from garbage import garbage
from hypothesis import example, given
from hypothesis import strategies as st
from links import link_server, linked
from own_ports import free_port
from program import until
from servers import served

from epd_serve.errors import InstanceLost, InstanceUnreachable, InstanceUntrusted, InvalidRequest, TooLarge
from epd_serve.rpc import link as links
from epd_serve.rpc import messages
from epd_serve.rpc.link import Link, LinkCall
from epd_serve.rpc.messages import OPENING, Data, End, Frames, Head, pack, pack_call
from epd_serve.rpc.server import BrokenStream, Pieces, Reply

MIB = 1 << 20
WELCOME = OPENING + bytes(pack(messages.Welcome("", "")))
HELLO = OPENING + bytes(pack(messages.Hello("", ""))) + bytes(pack(messages.Proof("")))


class Answers:
    """``cancelled`` are the paths of calls whose callers left; ``sent`` are bytes of streams."""

    def __init__(self):
        self.cancelled = []
        self.sent = 0
        self.go_on = asyncio.Event()
        self.calls = {
            "/echo": self.echo,
            "/wrong": self.refuse,
            "/faulty": self.fault,
            "/tokens": partial(self.stream, "/tokens", self.tokens),
            "/much": partial(self.stream, "/much", self.much),
            "/much and broken": partial(self.stream, "/much and broken", self.much_and_broken),
            "/broken": partial(self.stream, "/broken", self.broken),
            "/fault": partial(self.stream, "/fault", self.faulty),
            "/wait": partial(self.stream, "/wait", self.wait),
        }

    async def echo(self, body):
        return Reply(headers=((b"x-length", b"%d" % len(body)),), body=body)

    async def refuse(self, body):
        raise InvalidRequest("no such thing")

    async def fault(self, body):
        raise RuntimeError("a fault")

    async def stream(self, path, make, body):
        has_ended = False

        async def noted():
            nonlocal has_ended
            async with contextlib.aclosing(make()) as pieces:
                async for piece in pieces:
                    self.sent += len(piece)
                    yield piece
            has_ended = True

        return Reply(stream=noted(), on_close=lambda: None if has_ended else self.cancelled.append(path))

    async def tokens(self):
        for number in range(20):
            yield b"%d " % number
            await asyncio.sleep(0.002)

    async def much(self):
        for number in range(80):
            yield bytes([number]) * (128 * 1024)
            await asyncio.sleep(0)

    async def broken(self):
        yield b"half"
        raise BrokenStream("as it must")

    async def much_and_broken(self):
        async for piece in self.much():
            yield piece
        raise BrokenStream("as it must")

    async def faulty(self):
        yield b"half"
        raise RuntimeError("a fault")

    async def wait(self):
        yield b"first"
        await self.go_on.wait()
        yield b"last"


@pytest.fixture
async def answers():
    return Answers()


@pytest.fixture
async def server(answers):
    made = link_server(answers.calls)
    async with served(made):
        yield made


def port_of(server):
    return server.servers[0].sockets[0].getsockname()[1]


@pytest.fixture
async def to(server):
    async with Link("p0", f"http://127.0.0.1:{port_of(server)}") as made:
        yield made


def sent(to, path, body=b""):
    call = LinkCall(to, path, [body])
    to.send(call)
    return call


async def whole(call):
    try:
        async with asyncio.timeout(100):
            await call.opened
            return await call.read()
    finally:
        call.close()


async def test_calls_at_once_share_a_connection_and_each_has_its_answer(server, to):
    bodies = [b"%d" % number * 1000 for number in range(50)] + [bytes(9 * MIB)]
    assert await asyncio.gather(*[whole(sent(to, "/echo", body)) for body in bodies]) == bodies
    tokens = b"".join(b"%d " % number for number in range(20))
    assert await asyncio.gather(*[whole(sent(to, "/tokens")) for _ in range(20)]) == [tokens] * 20
    assert len(server.server_state.connections) == 1
    call = LinkCall(to, "/echo", [b"in ", b"", b"pieces"])
    to.send(call)
    assert await whole(call) == b"in pieces" and call.headers == {b"x-length": b"9"}


async def test_the_tokens_of_a_step_come_in_one_list(answers, to, monkeypatch):
    taken, take = [], Frames.take

    def noted(self, piece, most=None):
        lists = take(self, piece, most)
        taken.extend(len(one) for one in lists if isinstance(one, list))
        return lists

    calls = [sent(to, "/wait") for _ in range(30)]
    for call in calls:
        assert await anext(call.chunks()) == b"first"
    monkeypatch.setattr(Frames, "take", noted)
    answers.go_on.set()
    assert [await whole(call) for call in calls] == [b"last"] * 30
    assert max(taken) >= 30, "one pass of the server's loop makes one list"


async def test_what_comes_of_a_stream_with_one_read_is_one_piece():
    head, data = Head(1, []), partial(Data, 1)
    lists = told(head, data(b"a"), data(b"b")), told(data(b"c")), told(data(b"d"), End(1))
    async with saying(WELCOME, b"".join(lists)) as to:
        call, pieces = sent(to, "/much"), list[bytes]()
        await call.opened
        while not await call.forward(lambda data: pieces.append(data) or True):
            pass
        call.close()
    assert pieces == [b"abcd"]


@pytest.mark.parametrize(
    ("path", "error"),
    [("/wrong", "no such thing"), ("/nowhere", "no such call: /nowhere"), ("/faulty", "see its log")],
)
async def test_an_error_is_the_servers_own(to, path, error):
    with pytest.raises(Exception, match=error):
        await whole(sent(to, path))
    assert await whole(sent(to, "/echo", b"x")) == b"x"


@pytest.mark.parametrize("path", ["/broken", "/fault"])
async def test_an_answer_that_is_cut_off_is_the_only_one(answers, server, to, path):
    other = sent(to, "/wait")
    await other.opened
    call, found = sent(to, path), b""
    await call.opened
    with pytest.raises(InstanceLost, match="broke off its answer"):
        async for chunk in call.chunks():
            found += chunk
    call.close()
    answers.go_on.set()
    assert (found, await whole(other), len(server.server_state.connections)) == (b"half", b"firstlast", 1)


async def test_a_slow_reader_gets_all_of_an_answer_before_its_error(to):
    call, found = sent(to, "/much and broken"), b""
    await call.opened
    with pytest.raises(InstanceLost, match="broke off its answer"):
        async for chunk in call.chunks():
            found += chunk
            await asyncio.sleep(0.01)
    call.close()
    assert len(found) == 10 * MIB


async def test_what_the_writer_raises_ends_the_forwarding(to):
    def write(data):
        raise ValueError("full")

    call = sent(to, "/wait")
    await call.opened
    with pytest.raises(ValueError, match="full"):
        await call.forward(write)
    call.close()


async def test_a_call_that_is_closed_ends_alone(answers, server, to):
    one, other, unread = sent(to, "/wait"), sent(to, "/wait"), sent(to, "/much")
    await one.opened
    await unread.opened
    for call in (one, one, unread):
        call.close()
    await until(lambda: len(answers.cancelled) == 2)
    assert sorted(answers.cancelled) == ["/much", "/wait"]
    answers.go_on.set()
    assert await whole(other) == b"firstlast"
    closed_early = sent(to, "/echo")
    closed_early.close()
    assert closed_early.opened.cancelled() and len(server.server_state.connections) == 1


async def test_a_call_that_is_cancelled_leaves_nothing_to_the_garbage_collector(answers, to):
    with garbage() as left:
        call = sent(to, "/wait")
        await call.opened
        call.close()
        await until(lambda: answers.cancelled)
        await whole(sent(to, "/echo", b"x"))
    assert not left & {"_Answer", "Task", "Call"}


async def test_an_answer_that_is_too_long_is_not_collected(answers, to):
    with pytest.raises(InstanceLost, match="answered with more than 300000 bytes"):
        await to.ask("/much", max_bytes=300_000)
    await until(lambda: answers.cancelled)


async def test_a_server_that_ends_ends_all_streams_and_the_next_call_makes_a_connection(answers):
    port = free_port("127.0.0.1")
    async with Link("p0", f"http://127.0.0.1:{port}") as to:
        async with served(link_server(answers.calls, port=port)):
            calls = [sent(to, "/wait") for _ in range(10)]
            for call in calls:
                await call.opened
        for call in calls:
            with pytest.raises(InstanceLost, match="broke off"):
                await whole(call)
        assert len(answers.cancelled) == 10
        for _ in range(2):
            with pytest.raises(InstanceUnreachable) as caught:
                await whole(sent(to, "/echo"))
            assert caught.value.is_refused
        async with served(link_server(answers.calls, port=port)):
            assert await whole(sent(to, "/echo", b"x")) == b"x"


@pytest.mark.parametrize("url", ["http://a..b:8000", f"http://{'a' * 70}:8000"])
async def test_a_host_that_is_no_name_is_no_instance(url):
    async with Link("p0", url) as to:
        with pytest.raises(InstanceUnreachable, match=r"p0 at .* is not reachable"):
            await to.ask("/echo")
    with pytest.raises(ValueError, match="as in 'http:"):
        Link("p0", "10.0.0.1:9000")


async def test_a_server_that_stops_answers_what_it_has(answers, server, to):
    open_one = sent(to, "/wait")
    await open_one.opened
    [connection] = server.server_state.connections
    connection.shutdown()
    with pytest.raises(InstanceLost):
        await whole(sent(to, "/echo"))
    answers.go_on.set()
    assert await whole(open_one) == b"firstlast"
    await until(lambda: not server.server_state.connections)


def test_no_piece_of_a_call_is_empty():
    """With one, asyncio of Python 3.13 never closes the connection."""
    pieces = pack_call(1, "/echo", [b"", b"x", b""])
    assert all(pieces) and pieces[1:] == [b"x"]


async def test_a_call_that_is_too_long_is_refused(to, monkeypatch):
    monkeypatch.setattr(messages, "MAX_CALL_BYTES", 1000)
    with pytest.raises(TooLarge):
        await whole(sent(to, "/echo", bytes(1000)))
    assert await whole(sent(to, "/echo", b"x")) == b"x"


@contextlib.asynccontextmanager
async def saying(answer, then=b""):
    """A server that answers the greeting with ``answer``, and the first call with ``then``."""

    conversations = set[Any]()

    async def serve(reader, writer):
        conversations.add(asyncio.current_task())
        await reader.readexactly(len(OPENING))
        writer.write(answer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"/much")
            writer.write(then)
            await writer.drain()
            if then:
                await reader.read(65536)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening, Link("p0", f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as to:
        yield to
        await to.close()
        await asyncio.gather(*conversations)


def told(*said):
    return bytes(pack(list(said)))


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (b"\xff\xff\xff\x7f", "2147483647 bytes"),
        (b"\x03\x00\x00\x00abc", "cannot be read"),
        (told([9, 1]), "cannot be read"),
        (told([1, 1]), "cannot be read"),
        (told([1, 1, "text"]), "cannot be read"),
        (told(Head(1, []), *[Data(1, bytes(100_000))] * 3), "exceeded the reader.s window"),
        (b"", "closed|Broken pipe|reset"),  # as its end or a write meets it first
    ],
)
async def test_a_server_that_sends_what_it_may_not_is_lost(then, why):
    async with saying(WELCOME, then) as to:
        call = sent(to, "/much")
        with pytest.raises(InstanceLost, match=why):
            await call.opened
            for _ in range(20):  # passes of the loop, in which nobody reads
                await asyncio.sleep(0.005)
            await call.read()
        call.close()


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", InstanceUntrusted, "another version"),
        (b"\0epd-link/9\n", InstanceUntrusted, "another version"),
        (b"SSH-2.0", InstanceUntrusted, "another version"),
        (OPENING[:4], InstanceUnreachable, "did not greet"),
    ],
)
async def test_a_server_that_greets_otherwise_is_told_apart_from_a_dead_one(answer, error, why, monkeypatch):
    monkeypatch.setattr(links, "GREETING_S", 0.5)
    async with saying(answer) as to:
        with pytest.raises(error, match=why):
            await whole(sent(to, "/echo"))


async def test_a_caller_of_another_version_is_told_which_one_this_is(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    writer.write(b"\0epd-link/9\n")
    assert await reader.read() == OPENING
    writer.close()


CALL = b"".join(pack_call(1, "/wait", [b""]))


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        told([0, 1, "/wait", b""]).replace(b"wait", b"\xffait"),  # no UTF-8
        b"POST /stage/prefill HTTP/1.1\r\n\r\n",
        told([7, 1]),
        told([0, 1, "/wait"]),
        CALL,
        told(messages.Credit(1, 1)),
    ],
)
async def test_a_caller_that_sends_what_it_may_not_is_cut_off_with_its_calls(answers, server, to, said):
    other = sent(to, "/wait")
    await other.opened
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    writer.write(HELLO + CALL + said)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            await reader.read()
    writer.close()
    await until(lambda: len(server.server_state.connections) == 1)
    answers.go_on.set()
    assert await whole(other) == b"firstlast"


async def test_what_is_said_of_calls_that_are_over_changes_nothing(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    writer.write(
        HELLO
        + told(
            messages.Cancel(5),
            messages.Credit(6, 10),
            messages.Call(7, "/echo", memoryview(b"x")),
            messages.Cancel(3),
        )
    )
    expected = WELCOME + told(Head(7, [(b"x-length", b"1")]), Data(7, b"x"), End(7))
    assert await reader.readexactly(len(expected)) == expected
    writer.close()


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_link_may_be_closed_while_it_connects(loop_factory):
    async def scenario():
        async with linked({}) as url:
            for num_turns in range(12):  # of the event loop, before the call is given up
                for _ in range(10):
                    to = Link("p0", url)
                    call = sent(to, "/echo")
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
                    call.close()
                    async with asyncio.timeout(300):
                        await to.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


async def test_pieces_go_out_as_they_are_put_and_wait_for_their_own_reader_alone():
    much = [bytes([number]) * (MIB // 8) for number in range(8)]
    made = []

    async def answer(body):
        pieces = Pieces()
        made.append(pieces)
        pieces.put(b"first")
        return Reply(stream=pieces, body=b"behind")

    async with linked({"/answer": answer}) as url, Link("p0", url) as to:
        slow, quick, cut = [sent(to, "/answer") for _ in range(3)]
        for call in (slow, quick, cut):
            await call.opened
        for piece in much:
            made[0].put(piece)
        made[0].end()
        made[1].put(b"second")
        made[1].end()
        made[2].end(BrokenStream("as it must"))
        assert await whole(quick) == b"firstsecondbehind"
        with pytest.raises(InstanceLost):
            await whole(cut)
        assert await whole(slow) == b"".join([b"first", *much, b"behind"])


MESSAGES = st.lists(
    st.one_of(
        st.builds(Head, st.integers(1, 9), st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)))),
        st.builds(Data, st.integers(1, 1 << 40), st.binary(max_size=300)),
        st.builds(End, st.integers(1, 9)),
        st.builds(messages.Error, st.integers(1, 9), st.integers(0, 599), st.binary(max_size=9)),
    ),
    max_size=4,
)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(1, 400), min_size=1))
def test_messages_come_whole_however_their_bytes_come(lists, sizes):
    data, frames, found = (
        b"".join(bytes(pack(one)) for one in lists),
        Frames(messages.TO_CALLER, 1 << 20),
        list[Any](),
    )
    start = number = 0
    while start < len(data):
        size = sizes[number % len(sizes)]
        found += frames.take(data[start : start + size])
        start, number = start + size, number + 1
    assert found == lists


@given(st.binary(max_size=60))
@example(told([0, 1, "/wait", b""]).replace(b"wait", b"\xffait"))  # no UTF-8
def test_whatever_comes_is_a_message_or_closes_the_link(data):
    with contextlib.suppress(messages.LinkClosed):
        Frames(messages.TO_SERVER, 1 << 20).take(data)


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_connection_that_is_reset_as_it_is_made_is_closed_once(loop_factory, monkeypatch):
    """Its descriptor's number belongs to another file by the time that the socket is collected."""
    made = []

    async def connect(host, port):
        one = await connected(host, port)
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # which resets the connection
        await asyncio.to_thread(select.select, [one], [], [])
        made.append(one.fileno())
        return one

    async def scenario(url):
        async with Link("e0", url) as link:
            with pytest.raises(InstanceLost):
                await link.ask("/info")

    connected = links.sockets.connect
    monkeypatch.setattr(links.sockets, "connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as listener, asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
        try:
            assert made[0] in others, "the connection is closed"
            gc.collect()
            for other in others:
                os.fstat(other)
        finally:
            for other in others:
                with contextlib.suppress(OSError):
                    os.close(other)
