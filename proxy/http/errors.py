"""The answers to exceptions, in the shape of the OpenAI API."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from epd_serve.errors import InvalidRequest, ServeError
from proxy.http.sink import retry_headers


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
    problem = InvalidRequest(f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(problem.body(), error.status_code, error.headers)


async def _unexpected_error(_: Request, error: Exception) -> Response:
    problem = ServeError(f"an error inside the gateway: {type(error).__name__}")
    # The server closes the connection after such an error: the client must not send its next request there.
    return JSONResponse(problem.body(), 500, {"connection": "close"})
