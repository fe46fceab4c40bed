"""An instance's HTTP, for health and metrics alone, and its calls to other instances."""

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

#: For whoever starts the instance, and for Prometheus.
_OPEN = frozenset({"/health", "/health/live", "/metrics"})
#: For those too that look at an instance without a cluster key.
_KEYLESS = _OPEN | {"/info", "/integrity"}


class LookApp:
    """ASGI application of an instance: ``GET`` of what may be seen without a link. No body is read."""

    def __init__(self, service: LinkService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path = scope["path"]
        handler = self._service.calls.get(path)
        try:
            if path not in _OPEN and self._service.key is not None:
                raise _Unproved(f"this instance asks for its deployment's cluster_key: set {CLUSTER_KEY}")
            if scope["method"] != "GET" or path not in _KEYLESS or handler is None:
                raise NoSuchCall(f"there is no {scope['method']} {path} over HTTP")
            reply = await handler(b"")
            status, headers, body = 200, reply.headers, reply.body
        except ServeError as error:
            status, headers, body = error.status, (JSON,), error.to_json()
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})


class _Unproved(InvalidRequest):
    status = 401


class Peers:
    """Calls to other instances, each over one link: msgpack there, msgpack back."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    async def close(self) -> None:
        await asyncio.gather(*[link.close() for link in self._links.values()])

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        """Send a message and return the answer's body.

        Raises the ServeError that the peer answered with, and InstanceFailed with code ``peer_unreachable`` where
        it is gone or does not answer in ``timeout_s``.
        """
        if (link := self._links.get(url)) is None:
            link = self._links[url] = Link(url, url, cluster_key(), tls=tls_files())
        try:
            async with asyncio.timeout(timeout_s):
                return await link.ask(path, [wire.encode(message)], MAX_BODY_BYTES)
        except (InstanceLost, TimeoutError) as error:
            reason = str(error) or f"nothing in {timeout_s:g} s"
            raise unreachable(f"{url} does not answer {path}: {reason}") from error


def unreachable(message: str) -> InstanceFailed:
    """Return an error: this instance, which is well, cannot reach another, which may be well too."""
    return InstanceFailed(message, code=PEER_UNREACHABLE)
