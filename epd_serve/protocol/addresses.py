"""URLs under which servers are reached, and requests that web pages must not send there.

A page of another site can have the browser of somebody on this machine send requests to a control plane (CSRF),
also under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from typing import Any, ClassVar

from epd_serve.errors import ServeError


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """The URL under which a server on this machine that listens on ``host`` is reached from this machine."""
    scheme = "https" if tls else "http"
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether a server on ``host`` listens on every address."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=256)
def is_loopback_name(host: bytes) -> bool:
    """Whether the value of a ``Host`` header, with or without a port, is a loopback name."""
    return is_loopback(re.sub(r":[0-9]*$", "", host.decode("latin-1").lower()).strip("[]"))


_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class CrossSite(ServeError):
    """A request was refused because a web page may have made somebody's browser send it."""

    status: ClassVar[int] = 403
    type: ClassVar[str] = "permission_error"
    default_code: ClassVar[str | None] = "cross_site"


def cross_site(headers: Iterable[tuple[bytes, bytes]], *, is_local: bool) -> CrossSite | None:
    """Say why a request may come from a web page: it has an ``Origin``, or, where the server ``is_local`` to this
    machine, names another host than this one. ``headers`` have their names in lower case."""
    hosts = []
    for name, value in headers:
        if name == b"origin":
            return CrossSite("this server is not for web pages; send no Origin header")
        if name == b"host":
            hosts.append(value)
    if is_local and not (hosts and all(map(is_loopback_name, hosts))):
        shown = b", ".join(hosts)[:100].decode("latin-1")
        return CrossSite(f"this server is at localhost; the request's Host is {shown!r}")
    return None


class NoBrowsers:
    """ASGI middleware: refuses requests that :func:`cross_site` finds."""

    def __init__(self, app: _App, host: str) -> None:
        """``host`` is the address on which ``app`` is served."""
        self._app = app
        self._is_local = is_loopback(host)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        problem = self.find_problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": problem.to_json()})

    def find_problem(self, scope: _Scope) -> ServeError | None:
        """Return why a request is refused; None where it is not."""
        return cross_site(scope["headers"], is_local=self._is_local)
