"""Messages to a program that is run, or to a server that gets a POST."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import psutil

from epd_serve.config.elastic import HookConfig

logger = logging.getLogger(__name__)

_SHOWN = 300


async def tell(hook: HookConfig, message: Mapping[str, object]) -> bool:
    """Send a message; return whether the exit status was 0, or the HTTP status below 300.

    A failure is logged, never raised.
    """
    body = json.dumps(message).encode()
    try:
        async with asyncio.timeout(hook.timeout_s):
            problem = await (_post(hook.url, body) if hook.url is not None else _run(hook.command or (), body))
    except TimeoutError:
        problem = f"it took longer than {hook.timeout_s:g} s"
    except (OSError, aiohttp.ClientError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        # no more than where: addresses of webhooks and arguments of commands hold secrets
        where = urlsplit(hook.url).hostname if hook.url is not None else (hook.command or ("",))[0]
        logger.warning("elastic.hook %s: %s", where, problem)
    return not problem


async def _run(command: Sequence[str], body: bytes) -> str:
    status, _, words = await run_program(command, body)
    return "" if status == 0 else f"exit status {status}: {words}"


async def run_program(command: Sequence[str], body: bytes = b"", niceness: int = 0) -> tuple[int, bytes, str]:
    """Run a program to its end, or until cancelled; return its exit status, its output and the end of its errors.

    ``body`` is its input. Raises OSError where it cannot be started.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        if niceness:
            with suppress(psutil.Error):
                psutil.Process(process.pid).nice(niceness)
        output, words = await process.communicate(body)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output, words.decode(errors="replace").strip()[-_SHOWN:]


async def _post(url: str, body: bytes) -> str:
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.post(url, data=body, headers=headers) as answer,
    ):
        return "" if answer.status < 300 else f"status {answer.status}"
