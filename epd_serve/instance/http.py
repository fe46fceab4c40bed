"""HTTP server of an instance, for health and metrics only, and calls to other instances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from epd_serve.errors import PEER_UNREACHABLE, InstanceFailed, InstanceLost, InvalidRequest, ServeError
from epd_serve.protocol import wire
from epd_serve.rpc.cluster import CLUSTER_KEY, cluster_key
from epd_serve.rpc.link import MAX_BODY_BYTES, Link
from epd_serve.rpc.server import JSON, LinkService, NoSuchCall
from epd_serve.rpc.tls import tls_files

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Open to all, for supervisors and Prometheus.
_OPEN = frozenset({"/health", "/health/live", "/metrics"})
#: Open too on an instance without a cluster key.
_KEYLESS = _OPEN | {"/info", "/integrity"}


class LookApp:
    """ASGI application that serves ``GET`` requests for the paths available without a link. It reads no bodies."""

    def __init__(self, service: LinkService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path = scope["path"]
        handler = self._service.calls.get(path)
        try:
            if path not in _OPEN and self._service.key is not None:
                raise _Unproved(f"this instance requires its deployment's cluster_key: set {CLUSTER_KEY}")
            if scope["method"] != "GET" or path not in _KEYLESS or handler is None:
                raise NoSuchCall(f"{scope['method']} {path} is not available over HTTP")
            reply = await handler(b"")
            status, headers, body = 200, reply.headers, reply.body
        except ServeError as error:
            status, headers, body = error.status, (JSON,), error.to_json()
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})


class _Unproved(InvalidRequest):
    status = 401


class Peers:
    """Calls to other instances, with msgpack bodies, over one link per instance."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    async def close(self) -> None:
        await asyncio.gather(*[link.close() for link in self._links.values()])

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        """Send a message and return the body of the answer.

        Raises the peer's ServeError, or InstanceFailed with code ``peer_unreachable`` if the peer is lost or does
        not answer within ``timeout_s``.
        """
        if (link := self._links.get(url)) is None:
            link = self._links[url] = Link(url, url, cluster_key(), tls=tls_files())
        try:
            async with asyncio.timeout(timeout_s):
                return await link.ask(path, [wire.encode(message)], MAX_BODY_BYTES)
        except (InstanceLost, TimeoutError) as error:
            reason = str(error) or f"timeout after {timeout_s:g} s"
            raise unreachable(f"{url} does not answer {path}: {reason}") from error


def unreachable(message: str) -> InstanceFailed:
    """Return the error that this instance cannot reach another one, though both may be healthy."""
    return InstanceFailed(message, code=PEER_UNREACHABLE)
