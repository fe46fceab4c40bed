"""The client of a deployment's admin API, at a Unix socket or a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from epd_serve.errors import ServeError
from epd_serve.rpc.http import HttpPool, HttpServer
from epd_serve.rpc.tls import tls_files


class AdminError(Exception):
    """A call to the admin API failed."""


class AdminUnreachable(AdminError):
    """No admin API answers at the address."""


class AdminRefused(AdminError):
    """The admin API answered with an HTTP status from 400 and perhaps an error code."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AdminClient:
    """Calls to one admin API.

    Args:
        where: path of its socket, or its URL.
        headers: sent with each call, such as its key.
    """

    def __init__(self, where: Path | str, headers: Mapping[str, str] | None = None) -> None:
        self.where = where
        self._headers = {**(headers or {}), "content-type": "application/json"}

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = 30.0
    ) -> Any:
        """Return the JSON of the answer. Raises AdminRefused, AdminUnreachable and TimeoutError."""
        on_socket = isinstance(self.where, Path)
        url = "http://admin" if on_socket else str(self.where)
        pool = HttpPool(tls_files(), Path(self.where) if on_socket else None)
        try:
            server = _AdminServer("admin", url, pool)
        except ValueError as error:
            raise AdminUnreachable(f"{url!r} is not the URL of an admin API (http://127.0.0.1:9001)") from error
        data = b"" if body is None else msgspec.json.encode(body)
        async with pool:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await server.ask(method, quote(path, safe="/?=&"), data, self._headers)
            except ServeError as error:
                raise AdminUnreachable(f"{self.where} does not answer ({error.message})") from error
        return server.decode(answer)


class _AdminServer(HttpServer):
    def decode(self, body: bytes) -> Any:
        try:
            return msgspec.json.decode(body)
        except ValueError:  # also invalid UTF-8
            raise AdminUnreachable(f"the answer of {self.url} is not JSON") from None

    def error(self, status: int, body: bytes) -> Exception:
        content = self.decode(body)
        error = content.get("error") if isinstance(content, dict) else None
        found = error if isinstance(error, dict) else {}
        return AdminRefused(status, str(found.get("message") or content), found.get("code"))
