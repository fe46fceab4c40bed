"""Connections to a host that is gone end within seconds, whoever waits at the other end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hosts import Hosts, hosts

from epd_serve.rpc import sockets


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Hosts]:
    async with hosts(["a", "b"], tmp_path) as made:
        yield made


async def test_what_is_said_to_a_host_that_is_gone_fails(lab: Hosts) -> None:
    with lab["b"].run(lambda: socket.create_server((lab["b"].ip, 5000))) as listener:
        sockets.watch_accepted(listener)
        made = [lab["a"].run(lambda: sockets.connect_blocking(lab["b"].ip, 5000)) for _ in range(2)]
        accepted = [listener.accept()[0] for _ in made]
        lab.isolate("b")
        cut_at = time.monotonic()
        made[0].sendall(b"is anybody there?")  # the other one waits for an answer
        for connection in made:
            with pytest.raises(OSError, match="Connection timed out"):
                await asyncio.to_thread(connection.recv, 1)
        assert time.monotonic() - cut_at < 2 * sockets.SILENCE_S + 2
        began = time.monotonic()
        for connect in (_connect, lambda ip: sockets.connect_blocking(ip, 5000)):
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(lab["a"].run, lambda connect=connect: connect(lab["b"].ip))
        assert time.monotonic() - began >= 2 * sockets.CONNECT_S
        for connection in accepted:
            unread_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert unread_ms == 1000 * sockets.UNREAD_S and connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_KEEPALIVE
            )
        for connection in (*made, *accepted):
            connection.close()


def _connect(ip: str) -> socket.socket:
    return asyncio.run(sockets.connect(ip, 5000))
