"""Listening sockets, connections on which the kernel soon detects a dead host, and the limit of open files."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from epd_serve.errors import Unavailable

#: Limit of connecting. The kernel resends a lost first packet after 1 s (RFC 6298).
CONNECT_S = 2.0
#: Time without a packet before the first keep-alive probe; further probes follow every second.
_PROBE_AFTER_S = 2
#: Limit of a peer's silence, after which the connection fails.
SILENCE_S = 5
#: Limit for unacknowledged data at a server, whose peer may wait for a slow client of its own.
UNREAD_S = 60
_BACKLOG = 2048

P = TypeVar("P", bound=asyncio.BaseProtocol)


def listen(host: str, port: int, user: str) -> socket.socket:
    """Return a listening socket; port 0 chooses a free one. Raises ValueError that names the port's ``user``."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for ports closed recently
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)  # with SO_REUSEADDR, several sockets could merely bind the port
    except (OSError, OverflowError) as error:
        bound.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = getattr(error, "strerror", None) or error
        hint = "; set another port" if in_use else ""
        raise ValueError(f"{user} cannot listen on {host} port {port}: {reason}{hint}") from error
    return bound


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


def connect_blocking(host: str, port: int) -> socket.socket:
    """Return a watched, blocking connection. Raises OSError."""
    connection = socket.create_connection((host, port), CONNECT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch(connection)
    return connection


async def connect(host: str, port: int) -> socket.socket:
    """Return a watched, non-blocking connection. Raises OSError, for each address after at most CONNECT_S."""
    failure = OSError(f"{host} does not resolve")
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch(connection)
            await _connect(connection, address)
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    raise failure


async def _connect(connection: socket.socket, address: Any) -> None:
    """Connect, and ask the kernel at the end, as a busy event loop would notice the connection late."""
    loop, writable = asyncio.get_running_loop(), asyncio.Event()
    code = connection.connect_ex(address)
    if code == errno.EINPROGRESS:
        loop.add_writer(connection, writable.set)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(writable.wait(), CONNECT_S)
        finally:
            loop.remove_writer(connection)
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, f"Connect call failed {address}")
    try:
        connection.getpeername()
    except OSError:
        raise TimeoutError(f"no connection in {CONNECT_S:g} s") from None


async def create_connection(
    make: Callable[[], P], host: str, port: int, **options: Any
) -> tuple[asyncio.Transport, P]:
    """Call ``loop.create_connection`` with a watched connection. Raises OSError.

    If the peer resets the connection at once, uvloop closes the descriptor but not the socket object, which is
    detached here: it would close the next file with this descriptor when collected.
    """
    loop = asyncio.get_running_loop()
    connected = await connect(host, port)
    is_closing = True
    try:
        transport, protocol = await loop.create_connection(make, sock=connected, **options)
        is_closing = transport.is_closing()
    finally:
        if is_closing and isinstance(loop, uvloop.Loop):  # asyncio's transport closes the socket itself
            connected.detach()
    return transport, protocol


def raise_limit() -> int:
    """Raise this process's limit of open files, often 1,024, to its hard limit and return that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def shortage_error(error: OSError) -> Unavailable | None:
    """Return the error for a client if ``error`` means that no descriptor is left, else None."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Unavailable(
        f"too many connections: this process can open {most} files (ulimit -n); try again later",
        code="out_of_descriptors",
    )
