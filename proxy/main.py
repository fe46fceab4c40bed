"""The gateway as a process: uvicorn on uvloop and httptools."""

from __future__ import annotations

import gc
import logging
import signal
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from epd_serve.config import DeploymentConfig
from proxy.app import create_app
from proxy.connection import GatewayConnection
from proxy.redaction import redact_logs
from proxy.settings import GatewaySettings
from proxy.sink import ResponseAborted

#: How long requests in progress may go on after SIGTERM or Ctrl-C.
SHUTDOWN_GRACE_S = 5
#: Longer than any client's own, so that no client sends into a connection that is just being closed.
KEEP_ALIVE_S = 75
#: New containers between two collections of young ones; a request leaves some hundred.
_COLLECT_EVERY = 10_000


def run_gateway(config: DeploymentConfig, instances: list[tuple[str, str]], host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in progress (SHUTDOWN_GRACE_S) and return.

    Blocks; must run in the main thread, for the signals. ``instances`` are (name, control URL).
    """
    settings = GatewaySettings.of(config, host)
    redact_logs([settings.api_key, settings.admin.key if settings.admin else None])
    server = new_server(create_app(settings, instances), host, port)
    # uvicorn raises the signal that stopped it again when it is done; for us that is the regular end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_quietly)
    # What is loaded now stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 50)
    server.run()


def new_server(app: FastAPI, host: str, port: int) -> uvicorn.Server:
    """A uvicorn server as the gateway runs it; port 0 chooses a free one."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            loop="uvloop",
            http=cast(Any, GatewayConnection),
            ws="none",
            lifespan="on",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
    )
    logger = logging.getLogger("uvicorn.error")
    if _told_already not in logger.filters:
        logger.addFilter(_told_already)
    return server


def _told_already(record: logging.LogRecord) -> bool:
    """Drops uvicorn's traceback of an abort on purpose; the endpoint has logged what happened."""
    return not (record.exc_info and isinstance(record.exc_info[1], ResponseAborted))


def _stop_quietly(_: int, __: FrameType | None) -> None:
    """Nothing is left to do: uvicorn's own handler has stopped the server."""
