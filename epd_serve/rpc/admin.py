"""The client of a deployment's admin API, on a Unix socket or at a URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec


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
    """

    def __init__(self, where: Path | str, headers: Mapping[str, str] | None = None) -> None:
        self.where = where
        self._base = "http://admin" if isinstance(where, Path) else where.rstrip("/")
        self._headers = dict(headers or {})

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = 30.0
    ) -> Any:
        """The JSON of the answer. Raises AdminRefused, AdminUnreachable and TimeoutError."""
        status, data = await self._call(method, path, body, timeout_s)
        try:
            content = msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise AdminUnreachable(f"{self.where} answered {status}, and no JSON") from None
        if status >= 400:
            error = content.get("error") if isinstance(content, dict) else None
            found = error if isinstance(error, dict) else {}
            raise AdminRefused(status, str(found.get("message") or content), found.get("code"))
        return content

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        async with self._answer(method, path, body, timeout_s) as answer:
            return answer.status, await answer.read()

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        connector = aiohttp.UnixConnector(path=str(self.where)) if isinstance(self.where, Path) else None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector, timeout=timeout, headers=self._headers, trust_env=False
                ) as session,
                session.request(method, self._base + path, json=body) as answer,
            ):
                yield answer
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise AdminUnreachable(f"nothing answers at {self.where} ({error or type(error).__name__})") from error
