"""The client of a deployment's admin API, on a Unix socket or at a URL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from epd_serve.errors import ServeError
from epd_serve.rpc.http import HttpCall, HttpPool
from epd_serve.rpc.tls import TlsFiles, tls_files


class AdminError(Exception):
    """The admin API did not do what was asked."""


class AdminUnreachable(AdminError):
    """Nothing answers there, or something else than an admin API."""


class AdminRefused(AdminError):
    """The answer is a refusal.

    Attributes:
        status: of the HTTP answer.
        code: of the error, where it has one.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AdminClient:
    """Calls to one admin API.

    Args:
        where: the path of its socket, or its URL.
        headers: sent with each call: its key.
        cluster_key: proved to a URL, in place of that key.
        tls: for a URL at https; None: the files that the environment names.
    """

    def __init__(
        self,
        where: Path | str,
        headers: Mapping[str, str] | None = None,
        cluster_key: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.where = where
        self._tls = tls
        self._cluster_key = cluster_key
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = 30.0
    ) -> Any:
        """The JSON of the answer. Raises AdminRefused, AdminUnreachable and TimeoutError."""
        on_socket = isinstance(self.where, Path)
        url = "http://admin" if on_socket else str(self.where)
        data = b"" if body is None else msgspec.json.encode(body)
        headers = f"{self._headers}content-type: application/json\r\n"
        try:
            own_path = Path(self.where) if on_socket else None
            pool = HttpPool("admin", url, self._cluster_key, "admin", tls=self._tls or tls_files(), path=own_path)
        except ValueError as error:
            raise AdminUnreachable(f"{url!r} is no URL of an admin API, as in http://127.0.0.1:9001") from error
        async with pool:
            call = _AdminCall(pool, method, quote(path, safe="/?=&"), headers, [data])
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await call.ask()
            except ServeError as error:
                raise AdminUnreachable(f"nothing answers at {self.where} ({error.message})") from error
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError:
            raise AdminUnreachable(f"{self.where} answered {call.status}, and no JSON") from None


class _AdminCall(HttpCall):
    def error(self, body: bytes) -> Exception:
        try:
            content = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return AdminUnreachable(f"{self._pool.url} answered {self.status}, and no JSON")
        error = content.get("error") if isinstance(content, dict) else None
        found = error if isinstance(error, dict) else {}
        return AdminRefused(self.status, str(found.get("message") or content), found.get("code"))
