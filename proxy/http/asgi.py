"""What every route of an application shares: OpenAI's error objects, and CORS."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from epd_serve.errors import InvalidRequest, ServeError
from proxy.http.client import retry_headers

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
    """Answer what the router refuses: unknown paths and methods."""
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


_PREFLIGHT_S = 600


def install_cors(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let web pages of these origins call the application."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
            max_age=_PREFLIGHT_S,
        )
