"""Error objects, CORS and protection from web pages for all routes of an application."""

from __future__ import annotations

from typing import ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.addresses import CrossSite, NoBrowsers, is_loopback_name
from proxy.http.client import headers_of, retry_headers

#: Headers of an answer that web pages of other origins may read.
_SHOWN_HEADERS = ("x-request-id", "retry-after")


def install_error_handlers(app: FastAPI) -> None:
    """Errors of any route become OpenAI error objects."""
    app.add_exception_handler(ServeError, _serve_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


async def _serve_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return JSONResponse(error.body(), error.status, retry_headers(error.status, error.retry_after_s))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    meant = "/v1/" + path.rpartition("/v1/")[2].lstrip("/")  # a base URL without /v1, or with it twice
    known = {getattr(route, "path", "") for route in request.app.routes}
    hint = f"; did you mean {meant}?" if path not in known and meant in known else ""
    problem = InvalidRequest(f"{request.method} {path}: {error.detail}{hint}")
    return JSONResponse(problem.body(), error.status_code, error.headers)


async def _unexpected_error(_: Request, error: Exception) -> Response:
    problem = ServeError(f"an error inside the gateway: {type(error).__name__}")
    # The server closes the connection after such an error: the client must not send its next request there.
    return JSONResponse(problem.body(), 500, {"connection": "close"})


def install_cors(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let web pages of these origins call the application."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
            max_age=600,
        )


#: Takes files as a form, which pages of other sites may send, too: with a foreign ``Origin``.
_FORM_PATH = "/v1/audio/transcriptions"


class NotJson(InvalidRequest):
    """The body has another content type."""

    status: ClassVar[int] = 415
    default_code: ClassVar[str | None] = "unsupported_media_type"


class LocalGuard(NoBrowsers):
    """ASGI middleware for a gateway without keys on the loopback interface: refuses requests that a page of
    another site may have a browser on this machine send (CSRF, DNS rebinding)."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, "localhost")

    def find_problem(self, scope: Scope) -> ServeError | None:
        headers = headers_of(scope)
        host = headers.get(b"host")  # absent in HTTP/1.0, which no browser speaks
        if host is not None and not is_loopback_name(host):
            return CrossSite(
                f"this gateway has no API keys and answers loopback names alone; the request's Host is "
                f"{host[:100].decode('latin-1')!r}: call it as localhost, or set gateway.api_keys"
            )
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] != "POST" or media_type == b"application/json":
            return None
        if media_type == b"multipart/form-data" and scope["path"] == _FORM_PATH:
            origin = headers.get(b"origin")
            if origin is None or origin.partition(b"://")[2] == host:
                return None
            return CrossSite("pages of other sites may send no files here")
        return NotJson("send the header 'Content-Type: application/json'")
