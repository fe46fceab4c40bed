"""The gateway under ASGI, for what its own server leaves to uvicorn: a client, the answers to exceptions, CORS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from epd_serve.errors import InvalidRequest, ServeError
from proxy.http.arrival import Turn
from proxy.http.client import ClientLeft, Header, retry_headers, too_large
from proxy.http.connection import SHOWN_HEADERS, Cors


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
    """Let an application answer preflights, and these origins."""
    app.state.cors = Cors(origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=SHOWN_HEADERS,
            max_age=_PREFLIGHT_S,
        )


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """By name in lower case; the first of several with one name."""
    return dict(reversed(scope["headers"]))


class AsgiClient:
    """:class:`Client` over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers = headers_of(scope)
        self.address: str = (scope.get("client") or ("",))[0]
        self.loop = asyncio.get_running_loop()
        self.unread_bytes = 1  # nobody has counted
        self.turn: Turn | None = None
        self.on_left: Callable[[], None] | None = None
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._start: Sequence[Header] | None = None
        self._written: list[bytes | memoryview] = []
        self._ended = False
        self._sending = asyncio.Lock()

    async def body(self, max_bytes: int) -> bytearray:
        declared = self._headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise too_large(max_bytes)
        body = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            more = message.get("more_body", False)
        self._watcher = self.loop.create_task(self._watch())
        return body

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self.on_left is not None:
            self.on_left()  # or, says ASGI, the answer is complete

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def start(self, headers: Sequence[Header]) -> None:
        self._start = headers

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        self._written.append(data)
        self._ended = last
        return False

    async def drain(self) -> None:
        async with self._sending:  # several answers may share a stream
            if self._start is not None:
                headers, self._start = self._start, None
                await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})
            written, self._written = self._written, []
            if written:
                await self._send({"type": "http.response.body", "body": b"".join(written), "more_body": True})
                if self._ended:
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def let_go(self) -> None:
        pass

    def close(self) -> None:
        """The answer is complete, or will not be."""
        self.on_left = None
        if self._watcher is not None:
            self._watcher.cancel()
