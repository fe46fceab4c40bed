"""An ASGI application served inside a program that handles signals itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from epd_serve.rpc.bounded import BoundedHttp
from epd_serve.rpc.cluster import with_link
from epd_serve.rpc.tls import TlsFiles


class LinkedHttp(BoundedHttp):
    """Knows for each connection whether the cluster's key was proved on it; a base of other protocols, too."""

    max_body_bytes = 4 << 20  # of JSON: orders, deployment files

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = with_link(self.app_state)
        super().connection_made(transport)


@asynccontextmanager
async def serving(
    app: object, listener: socket.socket, http: type[asyncio.Protocol] = LinkedHttp, tls: TlsFiles | None = None
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
