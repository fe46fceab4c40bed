"""The launcher's part of the admin API, ``POST /apply``, on a Unix socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from epd_serve.config import DeploymentConfig, change_config
from epd_serve.launch.rollout import ApplyLimits, Rollout
from epd_serve.rpc.admin import AdminClient

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 24
#: For answers that are being written when the deployment ends.
_CLOSE_S = 1.0


class ApplyRequest(msgspec.Struct, kw_only=True):
    """A request to change the deployment: the body of ``POST /apply``.

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

    @property
    def is_last(self) -> bool:
        return self.done or bool(self.error)


class ControlServer:
    """The server of the launcher's socket."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner

    @classmethod
    async def start(cls, path: Path, applier: Rollout) -> ControlServer:
        """Listen at ``path``; any user who can enter its directory may change the deployment."""

        async def apply(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
            await answer.prepare(request)
            said: asyncio.Queue[News] = asyncio.Queue()
            work = asyncio.create_task(_carry_out(body, applier, said.put_nowait))
            try:
                while not (news := await said.get()).is_last:
                    await answer.write(msgspec.json.encode(news) + b"\n")
                await answer.write(msgspec.json.encode(news) + b"\n")
                return answer
            finally:
                work.cancel()  # the change itself goes on
                await asyncio.gather(work, return_exceptions=True)

        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/apply", apply)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        return cls(runner)

    async def close(self) -> None:
        await self._runner.cleanup()


async def _carry_out(body: bytes, applier: Rollout, say: Callable[[News], None]) -> None:
    """Carry a request out; the last of what is said has ``done`` or ``error``."""
    try:
        request = msgspec.json.decode(body, type=ApplyRequest)
        config = config_of(request, applier.config)
        if request.dry_run:
            found = await applier.plan(config)
            for text in (*(f"note: {note}" for note in found.notes), *map(str, found.steps)):
                say(News(say=text))
        else:
            limits = ApplyLimits(deadline_s=request.deadline_s, patience_s=request.patience_s)
            await applier.apply(config, limits, lambda text: say(News(say=text)))
    except ValueError as error:
        say(News(error=str(error)))
    except asyncio.CancelledError:
        say(News(error="the deployment is being stopped"))
    except Exception as error:
        logger.exception("apply failed")
        say(News(error=f"the launcher failed: {error!r}"))
    else:
        say(News(done=True))


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


async def ask_launcher(launcher: AdminClient, request: ApplyRequest, say: Callable[[str], None]) -> None:
    """Have a request carried out; return when it is.

    Raises ValueError with the launcher's reason for a refusal, and AdminUnreachable.
    """
    async for line in launcher.lines("POST", "/apply", msgspec.to_builtins(request)):
        news = msgspec.json.decode(line, type=News)
        if news.error:
            raise ValueError(news.error)
        if news.done:
            return
        say(news.say)
    raise ValueError("the deployment has ended")


def to_json(config: DeploymentConfig) -> dict[str, Any]:
    """A deployment as JSON, for :class:`ApplyRequest`."""
    found: dict[str, Any] = json.loads(config.model_dump_json(exclude_unset=True))
    return found
