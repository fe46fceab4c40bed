"""TCP connections on which the kernel detects a dead host within seconds."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

#: Limit of connecting.
CONNECT_S = 1.0
#: Start a second attempt after this time, as the kernel resends a lost first packet only after 1 s (RFC 6298).
_TRY_AGAIN_S = 0.3
#: Time without a packet before the first keep-alive probe; further probes follow every second.
_PROBE_AFTER_S = 2
#: Limit of a peer's silence, after which the connection fails.
SILENCE_S = 5
#: Limit for unacknowledged data at a server, whose peer may wait for a slow client of its own.
UNREAD_S = 60

#: (family, type, protocol, canonical name, address), as getaddrinfo() gives them.
Address = tuple[Any, Any, int, str, Any]

P = TypeVar("P", bound=asyncio.BaseProtocol)


def watch(connection: socket.socket, unread_s: int = SILENCE_S) -> None:
    """Let the kernel close a connection whose peer is silent for SILENCE_S or accepts no data for ``unread_s``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - _PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_s * 1000)


def watch_accepted(listener: socket.socket) -> None:
    """Watch the connections that a listener accepts, which inherit its settings."""
    watch(listener, UNREAD_S)


async def connect(host: str, port: int) -> socket.socket:
    """Return a watched, non-blocking connection. Raises OSError, at the latest after CONNECT_S."""
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await _connect(loop, address)
        except OSError as error:
            failure = failure or error
    raise failure or OSError(f"{host} does not resolve")


async def create_connection(
    make: Callable[[], P], host: str, port: int, **options: Any
) -> tuple[asyncio.Transport, P]:
    """Call ``loop.create_connection`` with a watched connection. Raises OSError.

    If the peer resets the connection at once, uvloop closes the descriptor but not the socket object, which is
    detached here: it would close the next file with this descriptor when collected.
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
    """Connect one address, polling the kernel, as a busy event loop would notice the connection late."""
    tries: list[socket.socket] = []
    changed = asyncio.Event()
    deadline = loop.time() + CONNECT_S
    try:
        while True:
            tries.append(one := socket.socket(*address[:3]))
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (code := one.connect_ex(address[4])) not in (0, errno.EINPROGRESS):
                raise OSError(code, f"Connect call failed {address[4]}")
            loop.add_writer(one, changed.set)
            left_s = deadline - loop.time()
            if (made := _find_connected(tries, address)) is None and left_s > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(_TRY_AGAIN_S, left_s))
                made = _find_connected(tries, address)
            if made is not None:
                loop.remove_writer(made)
                tries.remove(made)
                watch(made)
                return made
            if deadline <= loop.time():
                raise TimeoutError(f"no connection in {CONNECT_S:g} s")
            changed.clear()
    finally:
        for one in tries:
            loop.remove_writer(one)
            one.close()


def _find_connected(tries: Sequence[socket.socket], address: Address) -> socket.socket | None:
    """Return a connected socket, if any. Raises OSError if one was refused."""
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
    """Return a watched, blocking connection, from a thread without an event loop. Raises OSError."""
    connection = asyncio.run(connect(host, port))
    connection.setblocking(True)
    return connection
