"""Links for vLLM's processes, which lack an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack

from starlette.applications import Starlette

from epd_serve.errors import ServeError
from epd_serve.protocol.wire import Message, encode
from epd_serve.rpc.cluster import cluster_key
from epd_serve.rpc.link import Link
from epd_serve.rpc.server import Handler, LinkService, serve_app
from epd_serve.rpc.sockets import listen, watch_accepted

logger = logging.getLogger("vllm.epd_serve")

_CALL_S = 30.0


class LinkThread:
    """A thread that serves and makes calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = AsyncExitStack()
        self._links: dict[str, Link] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._open.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def serve(self, host: str, port: int, calls: Mapping[str, Handler]) -> int:
        """Serve calls at a port and return it; 0 chooses a free one."""
        listener = listen(host, port, "vLLM's plugin")
        watch_accepted(listener)
        service = LinkService(calls=calls, key=cluster_key())
        opening = self._open.enter_async_context(serve_app(Starlette(), listener, service.protocol))
        asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        bound: int = listener.getsockname()[1]
        return bound

    def send(self, address: str, path: str, message: Message) -> Future[None]:
        """Call the process at ``host:port``; failures are logged."""
        return asyncio.run_coroutine_threadsafe(self._send(address, path, message), self._loop)

    async def _send(self, address: str, path: str, message: Message) -> None:
        if address not in self._links:
            self._links[address] = Link(address, f"http://{address}", cluster_key())
            await self._open.enter_async_context(self._links[address])
        try:
            async with asyncio.timeout(_CALL_S):
                await self._links[address].ask(path, [encode(message)])
        except (ServeError, TimeoutError) as error:
            logger.warning("%s to %s: %s", path, address, error or "no answer in time")
