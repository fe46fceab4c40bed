"""The gateway's HTTP server: uvicorn on uvloop and httptools."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
import time
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.bounded import BoundedHttp
from proxy.http.client import ResponseAborted

#: Longer than clients' keep-alive, so that none sends on a connection that the server is closing.
KEEP_ALIVE_S = 75
#: Requests on idle connections within this time after retiring are answered, which ends the connection.
_RETIRE_S = 3.0
#: Share of the process's file descriptors for clients; the rest serves calls to instances.
_CONNECTION_SHARE = 0.75
#: Most log records of one text in a period.
_MOST_RECORDS, _PERIOD_S = 10, 60.0
#: Most log texts counted at a time, so that varying texts cannot fill memory.
_MAX_TEXTS = 1000


class GatewayServer(uvicorn.Server):
    """A uvicorn server that prints its address once it listens.

    Attributes:
        has_failed: set by :meth:`give_up`; the process should be restarted.
        retire_s: time for open requests after :meth:`retire`.
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
        """Finish open requests and stop; another gateway shares the listening socket.

        The server accepts no more connections. Each answer ends its connection, so that clients reconnect to the
        other gateway; idle connections close after a moment.
        """
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append((b"connection", b"close"))  # from the next second on
        self.config.timeout_graceful_shutdown = math.ceil(self.retire_s)
        asyncio.get_running_loop().call_later(_RETIRE_S, setattr, self, "should_exit", True)

    def give_up(self) -> None:
        """Finish open requests and stop after an internal failure."""
        self.has_failed = True
        self.should_exit = True


def new_server(
    app: FastAPI, host: str, port: int, *, grace_s: float = 30.0, retire_s: float = 600.0
) -> GatewayServer:
    """Return a server for the gateway's application; port 0 chooses a free port.

    Open requests get ``grace_s`` after SIGTERM or SIGINT and ``retire_s`` after SIGQUIT.
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
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(grace_s),
            limit_concurrency=int(_CONNECTION_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        )
    )
    server.retire_s = retire_s
    app.state.give_up = server.give_up
    logger = logging.getLogger("uvicorn.error")
    if _is_not_abort not in logger.filters:
        logger.addFilter(_is_not_abort)
        logger.addFilter(RateLimit())
        for name in ("proxy.media.fetch", "proxy.api.endpoint"):
            logging.getLogger(name).addFilter(RateLimit())
    return server


def _is_not_abort(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's traceback of an aborted stream; the endpoint has logged the cause."""
    return not (record.exc_info and isinstance(record.exc_info[1], ResponseAborted))


class RateLimit(logging.Filter):
    """Limits the log records that clients can cause: _MOST_RECORDS per message template in _PERIOD_S.

    The next period begins with the number dropped. Records with a traceback always pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # text → start of the period, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            return True
        text, now_s = str(record.msg), time.monotonic()
        since_s, number = self._seen.get(text, (now_s, 0))
        if now_s - since_s >= _PERIOD_S:
            if number > _MOST_RECORDS:
                record.msg = f"{text} ({number - _MOST_RECORDS} similar messages were dropped)"
            since_s, number = now_s, 0
        if len(self._seen) >= _MAX_TEXTS:
            self._seen.clear()
        self._seen[text] = since_s, number + 1
        return number < _MOST_RECORDS
