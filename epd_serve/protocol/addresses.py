"""Server URLs, and protection of control planes against requests from web pages.

A web page can make a browser on this machine send requests to a control plane (CSRF), even under the page's own
host name (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from epd_serve.errors import ServeError


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL that reaches, from this machine, a local server listening on ``host``."""
    scheme = "https" if tls else "http"
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def server_of(url: str) -> SplitResult:
    """Return the parts of a server's URL. Raises ValueError unless it is http(s) with a host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is not the URL of a server, as in 'http://10.0.0.1:9000'")
    return parts


def is_wildcard(host: str) -> bool:
    """Return whether a server on ``host`` listens on every address."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server listening on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=256)
def is_loopback_name(host: bytes) -> bool:
    """Return whether a ``Host`` header, with or without a port, names the loopback interface."""
    return is_loopback(re.sub(r":[0-9]*$", "", host.decode("latin-1").lower()).strip("[]"))


_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class CrossSite(ServeError):
    """The request may come from a web page, so it is refused."""

    status: ClassVar[int] = 403
    type: ClassVar[str] = "permission_error"
    default_code: ClassVar[str | None] = "cross_site"


def cross_site(headers: Iterable[tuple[bytes, bytes]], *, is_local: bool) -> CrossSite | None:
    """Return an error if the request may come from a web page, else None.

    It may if it has an ``Origin`` header, or if the server ``is_local`` and ``Host`` names another machine.
    Header names must be in lower case.
    """
    hosts = []
    for name, value in headers:
        if name == b"origin":
            return CrossSite("this server does not accept requests from web pages; remove the Origin header")
        if name == b"host":
            hosts.append(value)
    if is_local and not (hosts and all(map(is_loopback_name, hosts))):
        shown = b", ".join(hosts)[:100].decode("latin-1")
        return CrossSite(f"this server listens on localhost only, but the request's Host is {shown!r}")
    return None


class NoBrowsers:
    """ASGI middleware that refuses requests which may come from web pages (:func:`cross_site`)."""

    def __init__(self, app: _App, host: str) -> None:
        """Wrap ``app``, which is served on the address ``host``."""
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
        """Return the error to refuse the request with, or None to let it through."""
        return cross_site(scope["headers"], is_local=self._is_local)
