"""The launcher's control socket, for ``epd-serve apply``: one line of JSON there, lines of JSON back."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from epd_serve.config import DeploymentConfig, change_config
from epd_serve.launch.applying import Applier, ApplyLimits

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 1 << 24


class ApplyRequest(msgspec.Struct, kw_only=True):
    """A request to change the deployment.

    Attributes:
        config: a deployment as JSON has it; None: the one that runs.
        topology_only: of ``config``, take ``topology`` and ``devices`` alone.
        changes: keys that go over it.
        dry_run: report the steps and take none.
    """

    config: dict[str, Any] | None = None
    topology_only: bool = False
    changes: dict[str, Any] = {}
    dry_run: bool = False
    deadline_s: float = ApplyLimits().deadline_s
    patience_s: float = ApplyLimits().patience_s


class News(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the answer; the last one has ``done`` or ``error``."""

    say: str = ""
    error: str = ""
    done: bool = False


class ControlServer:
    """The launcher's side of the control socket."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    @classmethod
    async def start(cls, path: Path, applier: Applier) -> ControlServer:
        """Listen at ``path``; any user who can enter its directory may change the deployment."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            def say(news: News) -> None:
                if not writer.is_closing():
                    writer.write(msgspec.json.encode(news) + b"\n")

            try:
                with suppress(ConnectionError, asyncio.CancelledError):
                    if line := await reader.readline():
                        say(await _carry_out(line, applier, lambda text: say(News(say=text))))
                    await writer.drain()
            finally:
                writer.close()

        return cls(await asyncio.start_unix_server(answer, path, limit=_MAX_LINE_BYTES))

    async def close(self) -> None:
        self._server.close()


async def _carry_out(line: bytes, applier: Applier, say: Callable[[str], None]) -> News:
    """Carry a request out; return the last line of the answer."""
    try:
        request = msgspec.json.decode(line, type=ApplyRequest)
        config = config_of(request, applier.config)
        if request.dry_run:
            found = await applier.plan(config)
            for text in (*(f"note: {note}" for note in found.notes), *map(str, found.steps)):
                say(text)
        else:
            limits = ApplyLimits(deadline_s=request.deadline_s, patience_s=request.patience_s)
            await applier.apply(config, limits, say)
    except ValueError as error:
        return News(error=str(error))
    except asyncio.CancelledError:
        return News(error="the deployment is being stopped")
    except Exception as error:
        logger.exception("apply failed")
        return News(error=f"the launcher failed: {error!r}")
    return News(done=True)


def config_of(request: ApplyRequest, running: DeploymentConfig) -> DeploymentConfig:
    """The deployment that a request asks for. Raises ValueError where it is none."""
    if request.config is None:
        base = running
    elif request.topology_only:
        given = DeploymentConfig.model_validate(request.config)
        base = change_config(running, {"topology": str(given.topology), "devices": list(given.devices)})
    else:
        base = DeploymentConfig.model_validate(request.config)
    return change_config(base, request.changes)


def ask_launcher(path: Path, request: ApplyRequest, say: Callable[[str], None]) -> None:
    """Have a request carried out; return when it is.

    Raises ValueError with the launcher's reason for a refusal.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as answer:
                for line in answer:
                    news = msgspec.json.decode(line, type=News)
                    if news.error:
                        raise ValueError(news.error)
                    if news.done:
                        return
                    say(news.say)
        except OSError as error:
            raise ValueError(f"the deployment cannot be reached at {path}: {error}") from error
    raise ValueError("the deployment has ended")


def to_json(config: DeploymentConfig) -> dict[str, Any]:
    """A deployment as JSON, for :class:`ApplyRequest`."""
    found: dict[str, Any] = json.loads(config.model_dump_json(exclude_unset=True))
    return found
