"""The sockets of a gateway of several processes, which its parent makes and keeps."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from epd_serve.rpc.sockets import watch_accepted

_ANY_PORT = 0


class Listeners:
    """For each worker its own sockets at one address (SO_REUSEPORT): the kernel spreads connections over those on
    which somebody listens. They stay open here: connections to a worker that has died wait for its next life.
    """

    def __init__(self, host: str, port: int, count: int) -> None:
        """Raises ValueError where the address cannot be used, or is in use."""
        self.host = host
        self._addresses = _resolve(host, port)
        self._sockets: list[tuple[socket.socket, ...]] = []
        with ExitStack() as made:
            try:
                for family, address in self._addresses:  # among sockets that share a port, nobody would be told
                    with socket.socket(family, socket.SOCK_STREAM) as alone:
                        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        _only_ipv6(alone)
                        alone.bind(address)
                for _ in range(count):
                    self._sockets.append(tuple(made.enter_context(one) for one in self._bind()))
            except OSError as error:
                raise ValueError(
                    f"gateway.port: cannot listen on {host} port {port}: {error.strerror}; choose another port, "
                    "or 0 for any free one"
                ) from error
            made.pop_all()

    @property
    def port(self) -> int:
        number: int = self._sockets[0][0].getsockname()[1]
        return number

    def of(self, index: int) -> tuple[int, ...]:
        """Descriptors of the sockets of a worker."""
        return tuple(one.fileno() for one in self._sockets[index])

    def replace(self, index: int) -> None:
        """Others take the connections that come until the worker listens again; those that wait are refused."""
        old, self._sockets[index] = self._sockets[index], self._bind()
        _close(old)

    def close(self) -> None:
        """Idempotent; workers that listen go on."""
        for sockets in self._sockets:
            _close(sockets)

    def _bind(self) -> tuple[socket.socket, ...]:
        made: list[socket.socket] = []
        try:
            for family, address in self._addresses:
                one = socket.socket(family, socket.SOCK_STREAM)
                made.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                _only_ipv6(one)
                one.bind(address)
                if address[1] == _ANY_PORT:  # all the others take what this one has got
                    chosen = one.getsockname()[1]
                    self._addresses = [(kind, (at[0], chosen, *at[2:])) for kind, at in self._addresses]
        except OSError:
            _close(made)
            raise
        return tuple(made)


def admin_socket(host: str, port: int) -> socket.socket:
    """Listening. Raises ValueError where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"gateway.admin: cannot listen on {host}:{port}: {error.strerror}") from error
    watch_accepted(listener)
    return listener


def _resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses: dict[tuple[int, tuple[Any, ...]], None] = {}
    for family, _, _, _, address in found:
        addresses[int(family), address] = None
    if port == _ANY_PORT:  # one free port for two families cannot be had at once
        return list(addresses)[:1]
    return list(addresses)


def _only_ipv6(one: socket.socket) -> None:
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
