"""Requests that a web page may have a browser on this machine send to a gateway without keys.

A page of any site can send "simple" requests to 127.0.0.1 without asking first (CSRF), and read the answers where
it reaches the gateway under a name of its own (DNS rebinding). A gateway on the loopback interface that asks for
no key therefore answers loopback names alone, and takes bodies of types that browsers send across sites only with
permission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send

from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.addresses import CrossSite, is_loopback_name
from proxy.http.client import headers_of
from proxy.settings import Current

#: Files are sent there as a form, which pages may send, too: with a foreign ``Origin``.
_FORMS = frozenset({"/v1/audio/transcriptions"})


class NotJson(InvalidRequest):
    """The body has a content type that is not taken."""

    status: ClassVar[int] = 415
    default_code: ClassVar[str | None] = "unsupported_media_type"


class LocalGuard:
    """ASGI middleware: answers such requests with an error while the gateway has no keys and listens on the
    loopback interface."""

    def __init__(self, app: ASGIApp, settings: Current) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            problem = self._problem(scope["method"], scope["path"], headers_of(scope))
            if problem is not None:
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": problem.status, "headers": headers})
                await send({"type": "http.response.body", "body": problem.to_json()})
                return
        await self._app(scope, receive, send)

    def _problem(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> ServeError | None:
        now = self._settings.now
        if not now.is_local or now.gateway.needs_key:
            return None
        host = headers.get(b"host")  # HTTP/1.0 knows none, and no browser speaks it
        if host is not None and not is_loopback_name(host):
            return CrossSite(
                f"this gateway has no API keys and answers loopback names alone; the request's Host is "
                f"{host[:100].decode('latin-1')!r}: call it as localhost, or set gateway.api_keys"
            )
        if method != "POST":
            return None
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type == b"application/json":
            return None
        if media_type == b"multipart/form-data" and path in _FORMS:
            origin = headers.get(b"origin")
            if origin is None or origin.partition(b"://")[2] == host or _is_allowed(origin, now.gateway.cors):
                return None
            return CrossSite(
                f"pages of {origin[:100].decode('latin-1')!r} may send nothing here: see gateway.cors"
            )
        return NotJson(
            f"the body's content type is {media_type[:100].decode('latin-1')!r}; send the header "
            "'Content-Type: application/json'"
        )


def _is_allowed(origin: bytes, origins: Sequence[str]) -> bool:
    return "*" in origins or origin.decode("latin-1") in origins
