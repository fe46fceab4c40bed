"""The launcher's socket, where other programs of the same user ask for a change of the deployment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from epd_serve import __version__
from epd_serve.config import DeploymentConfig, change_config
from epd_serve.launch.rollout import ApplyLimits, Rollout
from epd_serve.rpc.link import AsyncLink, LinkClosed, NoMessage

logger = logging.getLogger(__name__)

_OTHER_VERSION = "the deployment was started by"
#: For answers that are being written when the deployment ends.
_CLOSE_S = 1.0


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
    """A part of the answer; the last one has ``done`` or ``error``."""

    say: str = ""
    error: str = ""
    done: bool = False


_REQUESTS: msgspec.msgpack.Decoder[ApplyRequest] = msgspec.msgpack.Decoder(ApplyRequest)
_NEWS: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


class ControlServer:
    """The server of the launcher's socket: any user who can enter its directory may change the deployment."""

    def __init__(self, applier: Rollout) -> None:
        self._applier = applier
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen at ``path``. Raises OSError."""
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        self._server.close()
        if self._answering:
            await asyncio.wait(self._answering, timeout=_CLOSE_S)
        for task in self._answering:
            task.cancel()  # the change itself goes on
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = AsyncLink(reader, writer, _REQUESTS)
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            await _carry_out(await link.receive(), self._applier, link.send)
        except NoMessage as error:
            text = f"{_OTHER_VERSION} epd-serve {__version__}, which does not understand this one ({error})"
            link.send(News(error=text))
        except LinkClosed:  # who only looks whether somebody listens says nothing
            pass
        finally:
            self._answering.discard(task)
            link.close()


async def _carry_out(request: ApplyRequest, applier: Rollout, say: Callable[[News], None]) -> None:
    """Carry a request out; the last of what is said has ``done`` or ``error``."""
    try:
        config = config_of(request, applier.config)
        if request.dry_run:
            found = await applier.plan(config)
            for text in (*found.lines(), *map(str, found.steps)):
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


async def ask_launcher(path: Path, request: ApplyRequest, say: Callable[[str], None]) -> None:
    """Have the launcher at the socket ``path`` carry a request out; return when it is.

    Raises ValueError with its reason for a refusal, and where nothing answers.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise ValueError(f"nothing answers at {path} ({error})") from error
    link = AsyncLink(reader, writer, _NEWS)
    link.send(request)
    try:
        while not ((news := await link.receive()).done or news.error):
            say(news.say)
    except NoMessage as error:
        raise ValueError(f"{_OTHER_VERSION} another version of epd-serve than {__version__}: {error}") from None
    except LinkClosed:
        raise ValueError("the deployment has ended") from None
    finally:
        link.close()
    if news.error:
        raise ValueError(news.error)
