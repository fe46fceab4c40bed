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
    """The protocol of admin APIs, whose bodies are JSON."""

    max_body_bytes = 4 << 20


@asynccontextmanager
async def serve_app(
    app: object, listener: socket.socket, http: Any = AdminHttp, tls: TlsFiles | None = None
) -> AsyncIterator[None]:
    """Serve ``app`` within the context on a listening socket, which is closed at the end.

    With ``tls``, callers must show a certificate.
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
    """uvicorn without its signal handling."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
