"""Answers that pages of other sites may read (CORS), where the deployment names these sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxy.http.client import Header

_SHOWN = ("x-request-id", "retry-after")
_PREFLIGHT_S = 600


class Cors:
    """``origins`` as browsers send them ("https://chat.example.com"), or "*" for any; none: nothing is allowed."""

    def __init__(self, origins: tuple[str, ...] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: Mapping[bytes, bytes]) -> list[Header]:
        """Return headers of an answer on the server's short way; the request's come with names in lower case."""
        origin = request.get(b"origin")
        if origin is None or not self._origins:
            return []
        shown = (b"access-control-expose-headers", ", ".join(_SHOWN).encode())
        if b"*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), shown]
        vary = (b"vary", b"Origin")
        return [(b"access-control-allow-origin", origin), shown, vary] if origin in self._origins else [vary]


def install_cors(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let an application answer preflights, and these origins."""
    app.state.cors = Cors(origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN,
            max_age=_PREFLIGHT_S,
        )
