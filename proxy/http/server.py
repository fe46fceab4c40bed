"""uvicorn's server with an end that drops no stream."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from epd_serve.protocol.addresses import url_of


class GatewayServer(uvicorn.Server):
    """After SIGTERM or SIGINT it is not ready, for ``delay_s`` it still serves what comes, then it takes nothing
    new and finishes what it has. A second signal ends it at once.

    Args:
        stopping: told that it is going to stop, so that ``/health/ready`` can say so; any thread.
        grace_s: how long requests in progress may go on.

    Attributes:
        has_failed: whether it ended by a fault of its own: whoever started it should start it again.
    """

    def __init__(
        self, config: uvicorn.Config, *, stopping: Callable[[], None], delay_s: float, grace_s: float
    ) -> None:
        config.timeout_graceful_shutdown = math.ceil(grace_s)
        super().__init__(config)
        self._stopping = stopping
        self._delay_s = delay_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self.has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            [port, *_] = (one.getsockname()[1] for server in self.servers for one in server.sockets)
            print(f"Ready: {url_of(self.config.host, port)}/v1; Ctrl-C stops.", flush=True)

    def give_up(self) -> None:
        """End as after a signal: what is in progress is finished, :attr:`has_failed` says that it was a fault."""
        self.has_failed = True
        if not self._is_stopping:
            self._stop_later()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_stopping or not self._delay_s or self._loop is None:
            self._stopping()
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._stop_later()

    def _stop_later(self) -> None:
        self._is_stopping = True
        self._stopping()
        assert self._loop is not None, "it has started"
        self._loop.call_soon_threadsafe(self._loop.call_later, self._delay_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def mark_stopping(state: Any) -> Callable[[], None]:
    """For ``stopping``: sets the flag that the application's health pages look at."""

    def mark() -> None:
        state.stopping = True

    return mark
