"""TCP connections between the processes of a deployment. A host that loses its power sends no end of a connection:
here the kernel asks it, and ends the connection within seconds.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

#: A connection is made within this time or not at all.
CONNECT_S = 1.0
#: A first packet that is lost would be sent again after a second (RFC 6298): another try begins after this time.
_TRY_AGAIN_S = 0.3
#: A peer is asked after this time without a word from it, then each second.
_ASK_AFTER_S = 2
#: A connection ends after this time without an answer.
SILENCE_S = 5
#: The same at a server's end: a peer without room for more may wait for a client of its own that reads slowly.
UNREAD_S = 60

#: (family, type, protocol, canonical name, address), as getaddrinfo() gives them.
Address = tuple[Any, Any, int, str, Any]

P = TypeVar("P", bound=asyncio.BaseProtocol)


def watch(connection: socket.socket, unread_s: int = SILENCE_S) -> None:
    """Have the kernel end a connection whose peer answers nothing for :data:`SILENCE_S`, or takes nothing of what
    is sent to it for ``unread_s``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - _ASK_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_s * 1000)


def watch_accepted(listener: socket.socket) -> None:
    """Watch a server's connections, which inherit the setting from the listener that accepts them."""
    watch(listener, UNREAD_S)


async def connect(host: str, port: int) -> socket.socket:
    """A connection that is watched, not blocking. Raises OSError where there is none within ``CONNECT_S``."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await _connect(loop, address)
        except OSError as error:
            failure = failure or error
    raise failure or OSError(f"{host} has no address")


async def create_connection(
    make: Callable[[], P], host: str, port: int, **options: Any
) -> tuple[asyncio.Transport, P]:
    """Return ``loop.create_connection`` of a watched connection. Raises OSError, and what that raises.

    A peer that resets the connection at once has uvloop close the descriptor before the socket belongs to the
    transport: collected, the socket would close the file that has the number by then.
    """
    loop = asyncio.get_running_loop()
    connected = await connect(host, port)
    try:
        transport, protocol = await loop.create_connection(make, sock=connected, **options)
    except BaseException:
        _release(loop, connected)
        raise
    if transport.is_closing():
        _release(loop, connected)
    return transport, protocol


def _release(loop: asyncio.AbstractEventLoop, closed: socket.socket) -> None:
    if isinstance(loop, uvloop.Loop):  # asyncio's transport closes the socket itself
        closed.detach()


async def _connect(loop: asyncio.AbstractEventLoop, address: Address) -> socket.socket:
    """Asks the kernel itself: a loop that stands still, as while it reads a burst of bodies, learns of it late."""
    tries: list[socket.socket] = []
    heard = asyncio.Event()
    deadline = loop.time() + CONNECT_S
    try:
        while True:
            tries.append(one := _new(address))
            if (code := one.connect_ex(address[4])) not in (0, errno.EINPROGRESS):
                raise OSError(code, f"Connect call failed {address[4]}")
            loop.add_writer(one, heard.set)
            left_s = deadline - loop.time()
            if (made := _made(tries, address)) is None and left_s > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), min(_TRY_AGAIN_S, left_s))
                made = _made(tries, address)
            if made is not None:
                loop.remove_writer(made)
                tries.remove(made)
                watch(made)
                return made
            if deadline <= loop.time():
                raise TimeoutError(f"no connection in {CONNECT_S:g} s")
            heard.clear()
    finally:
        for one in tries:
            loop.remove_writer(one)
            one.close()


def _made(tries: Sequence[socket.socket], address: Address) -> socket.socket | None:
    """The one that is connected. Raises OSError where one was refused."""
    poll = select.poll()
    for one in tries:
        poll.register(one, select.POLLOUT)
    for number, _ in poll.poll(0):
        one = next(one for one in tries if one.fileno() == number)
        if code := one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, f"Connect call failed {address[4]}")
        return one
    return None


def connect_blocking(host: str, port: int) -> socket.socket:
    """As :func:`connect`, from a thread without an event loop; the connection blocks, without a limit of time."""
    connection = asyncio.run(connect(host, port))
    connection.setblocking(True)
    return connection


def _new(address: Sequence[Any]) -> socket.socket:
    one = socket.socket(address[0], address[1], address[2])
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one
