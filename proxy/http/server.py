"""The gateway's HTTP server: uvicorn on uvloop and httptools."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.bounded import BoundedHttp
from proxy.http.client import ResponseAborted
from proxy.observe.log_filters import Sparing

#: Longer than clients' own, so that none sends into a connection that is just being closed.
KEEP_ALIVE_S = 75
#: A client with an idle connection that sends a request within this time gets an answer that ends the connection.
_RETIRE_S = 3.0
#: Connections may use this share of the files that the process may open; the rest is for calls to instances.
_CONNECTION_SHARE = 0.75


class GatewayServer(uvicorn.Server):
    """Prints its address once it listens.

    Attributes:
        has_failed: True after :meth:`give_up`: whoever started the server should start it again.
        retire_s: time that requests in progress have after :meth:`retire`.
    """

    has_failed = False
    retire_s = 600.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self.retire)
        if self.started:
            [port, *_] = (one.getsockname()[1] for server in self.servers for one in server.sockets)
            print(f"Ready: {url_of(self.config.host, port)}/v1; Ctrl-C stops.", flush=True)

    def retire(self) -> None:
        """Finish the requests in progress and end: another gateway has the same listening socket.

        Nothing is accepted from now on. Each answer ends its connection, so that clients come back to the other
        gateway; after a moment the idle connections are closed. Requests may take ``retire_s``.
        """
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append((b"connection", b"close"))  # from the next second on
        self.config.timeout_graceful_shutdown = math.ceil(self.retire_s)
        asyncio.get_running_loop().call_later(_RETIRE_S, self._stop)

    def _stop(self) -> None:
        self.should_exit = True

    def give_up(self) -> None:
        """Finish the requests in progress and end, because a part of the gateway failed."""
        self.has_failed = True
        self.should_exit = True


def new_server(
    app: FastAPI, host: str, port: int, *, grace_s: float = 30.0, retire_s: float = 600.0
) -> GatewayServer:
    """Return a server for the gateway's application; port 0 chooses a free one.

    Requests in progress may take ``grace_s`` after SIGTERM or SIGINT, and ``retire_s`` after SIGQUIT.
    """
    server = GatewayServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            loop="uvloop",
            http=cast(Any, BoundedHttp),
            ws="none",
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(grace_s),
            limit_concurrency=int(_CONNECTION_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        )
    )
    server.retire_s = retire_s
    app.state.give_up = server.give_up
    logger = logging.getLogger("uvicorn.error")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)
        logger.addFilter(Sparing())
        for name in ("proxy.media.fetch", "proxy.api.endpoint"):
            logging.getLogger(name).addFilter(Sparing())
    return server


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's traceback of an aborted stream, whose cause the endpoint has logged."""
    return not (record.exc_info and isinstance(record.exc_info[1], ResponseAborted))
