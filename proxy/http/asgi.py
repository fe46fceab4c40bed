"""Error objects, CORS and cross-site protection for all routes of an application."""

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

#: Response headers that web pages of other origins may read.
_EXPOSED_HEADERS = ("x-request-id", "retry-after")


def install_error_handlers(app: FastAPI) -> None:
    """Turn the errors of all routes into OpenAI error objects."""
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
    meant = "/v1/" + path.rpartition("/v1/")[2].lstrip("/")  # the base URL lacks /v1 or has it twice
    known = {getattr(route, "path", "") for route in request.app.routes}
    hint = f"; did you mean {meant}?" if path not in known and meant in known else ""
    problem = InvalidRequest(f"{request.method} {path}: {error.detail}{hint}")
    return JSONResponse(problem.body(), error.status_code, error.headers)


async def _unexpected_error(_: Request, error: Exception) -> Response:
    problem = ServeError(f"an error inside the gateway: {type(error).__name__}")
    # the server closes the connection after such an error; tell the client
    return JSONResponse(problem.body(), 500, {"connection": "close"})


def install_cors(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Allow web pages of these origins to call the application."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
            max_age=600,
        )


#: Accepts a form, which pages of other sites can send with a foreign ``Origin``.
_FORM_PATH = "/v1/audio/transcriptions"


class NotJson(InvalidRequest):
    """The body has another content type."""

    status: ClassVar[int] = 415
    default_code: ClassVar[str | None] = "unsupported_media_type"


class LocalGuard(NoBrowsers):
    """Refuses cross-site requests (CSRF, DNS rebinding) to a gateway without keys on the loopback interface."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, "localhost")

    def find_problem(self, scope: Scope) -> ServeError | None:
        headers = headers_of(scope)
        host = headers.get(b"host")  # absent in HTTP/1.0, which browsers do not use
        if host is not None and not is_loopback_name(host):
            return CrossSite(
                f"a gateway without API keys answers only loopback names, not Host "
                f"{host[:100].decode('latin-1')!r}; call it as localhost or set gateway.api_keys"
            )
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] != "POST" or media_type == b"application/json":
            return None
        if media_type == b"multipart/form-data" and scope["path"] == _FORM_PATH:
            origin = headers.get(b"origin")
            if origin is None or origin.partition(b"://")[2] == host:
                return None
            return CrossSite("pages of other sites may not send files here")
        return NotJson("send the header 'Content-Type: application/json'")
