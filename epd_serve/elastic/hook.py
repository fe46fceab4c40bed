"""Telling somebody outside: a program that is run, or a server that gets a POST."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

logger = logging.getLogger(__name__)

_SHOWN = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """One of ``command`` and ``url`` is None."""

    command: tuple[str, ...] | None = None
    url: str | None = None
    timeout_s: float = 30.0

    async def tell(self, message: Mapping[str, object]) -> bool:
        """Whether it was taken: exit status 0, or a status below 300. What goes wrong is logged, never raised."""
        body = json.dumps(message).encode()
        try:
            async with asyncio.timeout(self.timeout_s):
                problem = await (self._run(body) if self.command is not None else self._post(body))
        except TimeoutError:
            problem = f"it took longer than {self.timeout_s:g} s"
        except (OSError, aiohttp.ClientError) as error:
            problem = str(error) or type(error).__name__
        if problem:
            # no more than where: addresses of webhooks and arguments of commands hold secrets
            where = urlsplit(self.url).hostname if self.url is not None else (self.command or ("",))[0]
            logger.warning("elastic.hook %s: %s", where, problem)
        return not problem

    async def _run(self, body: bytes) -> str:
        assert self.command is not None
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=pipe, stdout=asyncio.subprocess.DEVNULL, stderr=pipe
        )
        try:
            _, words = await process.communicate(body)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return ""
        return f"exit status {process.returncode}: {words.decode(errors='replace').strip()[-_SHOWN:]}"

    async def _post(self, body: bytes) -> str:
        assert self.url is not None
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.post(self.url, data=body, headers=headers) as answer,
        ):
            return "" if answer.status < 300 else f"status {answer.status}"
