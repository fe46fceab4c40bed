"""HTTP servers in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from aiohttp import web


class QuietServer(uvicorn.Server):
    """Leaves the test's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(server: uvicorn.Server) -> AsyncIterator[str]:
    """While it serves; yields its URL."""
    server.__class__ = QuietServer
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the server did not start"
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def answered(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    *,
    host: str = "127.0.0.1",
    path: Path | None = None,
) -> AsyncIterator[int]:
    """A server that answers all requests by a function, at a socket's path if there is one; yields its port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await (web.TCPSite(runner, host, 0) if path is None else web.UnixSite(runner, str(path))).start()
        yield runner.addresses[0][1] if path is None else 0
    finally:
        await runner.cleanup()
