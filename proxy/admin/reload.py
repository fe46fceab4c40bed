"""The deployment file read again and taken over while requests run: on SIGHUP, and when it has changed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from epd_serve.config import DeploymentConfig
from epd_serve.config.applied import changes, taken_over
from proxy.admission.control import AdmissionControl, key_holders
from proxy.fleet.members import Members
from proxy.settings import Current, GatewaySettings

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class Reloader:
    """Calls ``apply`` when the file has changed, or when told to.

    Args:
        apply: reads the file and takes it over, all of it or nothing. Raises ValueError for a file that is
            refused; that is logged, and everything stays as it was.
        look_s: how often the file's time and size are looked at.
    """

    def __init__(self, file: Path, apply: Callable[[], None], *, look_s: float = _LOOK_S) -> None:
        self._file = file
        self._apply = apply
        self._look_s = look_s
        self._asked = asyncio.Event()
        self._seen: tuple[int, int] | None = None

    def ask(self) -> None:
        """Read the file now, whether it has changed or not. SIGHUP does it too."""
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        with suppress(ValueError, RuntimeError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.ask)
        self._seen = self._stamp()
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._asked.wait()
            except TimeoutError:
                if self._stamp() == self._seen:
                    continue
            self._asked.clear()
            self.reload()

    def reload(self) -> bool:
        """Whether the file was taken over."""
        try:
            self.take()
        except (ValueError, OSError) as error:
            logger.error("%s is refused, the configuration stays as it was: %s", self._file, error)
            return False
        logger.info("%s was read again", self._file)
        return True

    def take(self) -> None:
        """Take the file over. Raises ValueError or OSError for one that is refused: all stays as it was then."""
        self._seen = self._stamp()  # before the look at it: what is written meanwhile is read again
        self._apply()

    def _stamp(self) -> tuple[int, int] | None:
        """None while there is no file, as there is for a moment when an editor replaces it."""
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size


#: Their values are not for the log.
_SECRET = ("gateway.api_key", "gateway.api_keys")


class ConfigReload:
    """The parts of one gateway that an operator changes.

    Attributes:
        settings: where its parts read them.
    """

    def __init__(self, settings: Current, members: Members, admission: AdmissionControl) -> None:
        self.settings = settings
        self._members = members
        self._admission = admission

    def left_by(self, settings: GatewaySettings) -> list[str]:
        """The options that differ in other settings and are not taken over by this gateway while it runs."""
        old, new = self.settings.now, settings
        different = changes(old.config, new.config)
        left = [path for path, how in different if how.how != "hot" and _is_read(path, old)]
        if old.admin_key != new.admin_key and old.gateway.admin.key == new.gateway.admin.key:
            left.append("gateway.admin.key")
        if old.join_key != new.join_key and old.gateway.admin.join_key == new.gateway.admin.join_key:
            left.append("gateway.admin.join_key")
        if old.cluster_key != new.cluster_key and old.config.cluster_key == new.config.cluster_key:
            left.append("cluster_key")
        return left

    def apply(self, settings: GatewaySettings, instances: Sequence[tuple[str, str]]) -> None:
        """From now on. Raises ValueError for instances that cannot be, and changes nothing then."""
        self._members.replace(instances)
        old = self.settings.now
        if left := self.left_by(settings):
            logger.warning("a change of %s needs another start of the gateway", ", ".join(left))
        now = replace(old, config=_merged(old.config, settings.config), api_key=settings.api_key)
        self.settings.now = now
        hot = [path for path, how in changes(old.config, now.config) if how.how == "hot"]
        if shown := [_shown(now.config, path) for path in hot if path != "gateway.instances"]:
            logger.info("changed: %s", ", ".join(shown))
        if (old.api_key, old.gateway.api_keys) != (now.api_key, now.gateway.api_keys):
            self._admission.authenticator.replace(key_holders(now))
        self._admission.queue.resize(now.gateway.max_in_flight, now.gateway.max_queue)


def _merged(old: DeploymentConfig, new: DeploymentConfig) -> DeploymentConfig:
    """With what is applied at once, and with the new settings of instances, which others look after."""
    return old.model_copy(update={**taken_over(old, new, "hot"), "instances": new.instances, "roles": new.roles})


def _is_read(path: str, settings: GatewaySettings) -> bool:
    """Whether this gateway looks at an option."""
    top = path.partition(".")[0]
    return top in ("gateway", "trace", "cluster_key", "tls") or (
        top == "vllm" and settings.config.engine == "vllm"
    )


def _shown(config: DeploymentConfig, path: str) -> str:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return path if path in _SECRET else f"{path} = {value}"
