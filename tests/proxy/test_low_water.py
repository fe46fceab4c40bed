"""When the system says that a body has come: over real sockets."""

import asyncio
import fcntl
import select
import socket
import struct
import termios

import pytest
import uvloop

from proxy.http.arrival import MARK_BYTES, LowWater


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request):
    loop = request.param()
    yield loop
    loop.close()


async def transport_and_peer() -> tuple[asyncio.Transport, socket.socket]:
    """A server's side of a connection that reads nothing by itself, and its client."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, connection)
    transport.pause_reading()
    return transport, peer


def is_readable(transport: asyncio.Transport) -> bool:
    number = transport.get_extra_info("socket").fileno()
    return bool(select.select([number], [], [], 0)[0])


def wait_until_there(transport: asyncio.Transport, nbytes: int) -> None:
    number = transport.get_extra_info("socket").fileno()
    while struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, b"\0\0\0\0"))[0] < nbytes:
        pass


def mark_of(transport: asyncio.Transport) -> int:
    return transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_a_body_is_there_when_all_of_it_is(loop):
    async def run() -> None:
        transport, peer = await transport_and_peer()
        with peer:
            LowWater(transport).expect(MARK_BYTES)
            peer.sendall(bytes(MARK_BYTES - 1))
            wait_until_there(transport, MARK_BYTES - 1)
            assert not is_readable(transport)
            peer.sendall(b"1")
            wait_until_there(transport, MARK_BYTES)
            assert is_readable(transport)
            transport.abort()

    loop.run_until_complete(run())


def test_the_end_of_the_connection_is_told_at_once(loop):
    async def run() -> None:
        transport, peer = await transport_and_peer()
        LowWater(transport).expect(MARK_BYTES)
        peer.sendall(b"1")
        peer.close()
        while not is_readable(transport):
            pass
        transport.abort()

    loop.run_until_complete(run())


def test_the_mark_follows_what_is_to_come(loop):
    async def run() -> None:
        transport, peer = await transport_and_peer()
        with peer:
            low_water = LowWater(transport)
            for left, mark in (
                (MARK_BYTES - 1, 1),
                (3 * MARK_BYTES, MARK_BYTES),
                (MARK_BYTES, MARK_BYTES),
                (MARK_BYTES - 1, 1),  # what is left comes as it comes
                (MARK_BYTES, MARK_BYTES),
                (-3, 1),  # the next request has begun
            ):
                low_water.expect(left)
                assert mark_of(transport) == mark, left
            transport.abort()

    loop.run_until_complete(run())


def test_other_sockets_are_left_as_they_are(loop):
    async def run() -> None:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, sock=ours)
        with theirs:
            LowWater(transport).expect(MARK_BYTES)
            theirs.sendall(b"1")
            transport.pause_reading()
            assert mark_of(transport) == 1
            transport.abort()

    loop.run_until_complete(run())
