"""An ASGI application served inside a program that handles signals itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from epd_serve.rpc.bounded import BoundedHttp
from epd_serve.rpc.tls import TlsFiles


class AdminHttp(BoundedHttp):
    """Takes JSON: orders, deployment files."""

    max_body_bytes = 4 << 20


@asynccontextmanager
async def serving(
    app: object, listener: socket.socket, http: Any = AdminHttp, tls: TlsFiles | None = None
) -> AsyncIterator[None]:
    """Serve ``app`` while the context lasts, on a socket that listens and is closed then.

    With ``tls`` callers show a certificate.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=http,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        **({} if tls is None else tls.server_options),
    )
    server = _QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handling, which is the program's own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
