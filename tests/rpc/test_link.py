"""Messages arrive whole and in order over a link, and either end learns that the other one is gone."""

from __future__ import annotations

import asyncio
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.rpc.link import AsyncLink, Link, LinkClosed, pack


class Words(msgspec.Struct, frozen=True, tag=True):
    text: str


class Bulk(msgspec.Struct, frozen=True, tag=True):
    data: bytes


Message = Words | Bulk
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
MESSAGES = [Words("a"), Bulk(bytes(3)), Bulk(bytes(1 << 20)), Words(""), Words("b" * 70_000), Words("c")]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def sent(end: socket.socket, data: bytes) -> threading.Thread:
    """A thread that sends: the other end may have to read before all of it is gone."""
    thread = threading.Thread(target=end.sendall, args=(data,), daemon=True)
    thread.start()
    return thread


@given(cuts=st.lists(st.integers(1, 200), min_size=1), texts=st.lists(st.text(max_size=90), min_size=1))
def test_messages_are_whole_wherever_they_are_cut(cuts: list[int], texts: list[str]) -> None:
    data = b"".join(pack(Words(text)) for text in texts)
    ours, theirs = socket.socketpair()
    with theirs:
        link, found = Link(ours, DECODER), list[Message]()
        at = 0
        while at < len(data):
            cut = cuts[at % len(cuts)]
            theirs.sendall(data[at : at + cut])
            at += cut
            found += link.read()
        assert found == [Words(text) for text in texts]
        link.close()


def test_messages_come_whole_and_in_order_from_either_kind_of_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    async def echo(end: socket.socket) -> None:
        link = await AsyncLink.over(end, DECODER)
        for _ in MESSAGES:
            link.send(await link.receive())
        with pytest.raises(LinkClosed):
            await link.receive()
        link.send(Words("to nobody"))
        link.close()

    own = ends[1].dup()
    ends[1].close()
    thread = threading.Thread(target=lambda: asyncio.run(echo(own)), daemon=True)
    thread.start()
    link = Link(ends[0], DECODER)
    for message in MESSAGES:
        link.send(message)
    assert [link.receive() for _ in MESSAGES] == MESSAGES
    link.close()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "data", [struct.pack("<I", 1001) + bytes(1001), struct.pack("<I", 1) + b"\xc1", bytes(pack([1, 2]))]
)
def test_an_end_that_sends_no_message_is_gone(ends: tuple[socket.socket, socket.socket], data: bytes) -> None:
    """Too long, no MessagePack, another type: memory is not taken for it, and nobody waits for the next."""
    sending = sent(ends[1], data)
    with pytest.raises(LinkClosed, match=r"limit|no message"):
        Link(ends[0], DECODER, max_bytes=1000).receive()
    sending.join(60)

    async def receive(end: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=end)
        try:
            with pytest.raises(LinkClosed, match=r"limit|no message"):
                await AsyncLink(reader, writer, DECODER, max_bytes=1000).receive()
        finally:
            writer.close()

    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        asyncio.run(receive(ours))


def test_a_message_that_is_too_long_is_not_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    link = Link(ends[0], DECODER, max_bytes=1000)
    with pytest.raises(ValueError, match="1000 are the limit"):
        link.send(Bulk(bytes(1000)))
    link.send(Words("short"))
    assert Link(ends[1], DECODER).receive() == Words("short")


def test_a_link_that_is_closed_while_a_thread_receives_ends_for_both(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Else a follower waits for its leader's next command until it is killed."""
    ours, theirs = Link(ends[0], DECODER), Link(ends[1], DECODER)
    over: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive(link: Link[Message], name: str) -> None:
        with pytest.raises(LinkClosed):
            link.receive()
        over.put(name)

    for link, name in ((ours, "ours"), (theirs, "theirs")):
        threading.Thread(target=receive, args=(link, name), daemon=True).start()
    time.sleep(0.1)  # until both are in their system calls; where they are not, there is nothing to see
    ours.close()
    assert {over.get(timeout=300) for _ in range(2)} == {"ours", "theirs"}
    with pytest.raises(LinkClosed):
        theirs.send(Words("to nobody"))
