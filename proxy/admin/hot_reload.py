"""Takes a changed configuration over while requests run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from epd_serve.config import DeploymentConfig
from epd_serve.config.applied import changes, taken_over
from proxy.admission.control import AdmissionControl, key_holders
from proxy.fleet.members import Members
from proxy.settings import Current, GatewaySettings
from proxy.workers.ledger import Ledger

logger = logging.getLogger(__name__)

#: Their values are not for the log.
_SECRET = ("gateway.api_key", "gateway.api_keys")


class ConfigReload:
    """The parts of one gateway that an operator changes.

    Attributes:
        settings: where its parts read them.
    """

    def __init__(
        self, settings: Current, members: Members, admission: AdmissionControl, ledger: Ledger | None = None
    ) -> None:
        self.settings = settings
        self._members = members
        self._admission = admission
        self._ledger = ledger

    def left_by(self, settings: GatewaySettings) -> list[str]:
        """The options that differ in other settings and are not taken over by this gateway while it runs."""
        return list(self._left_by(settings))

    def _left_by(self, new: GatewaySettings) -> Iterator[str]:
        old = self.settings.now
        for path, how in changes(old.config, new.config):
            if how.how != "hot" and _is_read(path, old):
                yield path
        if old.admin_key != new.admin_key and old.gateway.admin.key == new.gateway.admin.key:
            yield "gateway.admin.key"
        if old.cluster_key != new.cluster_key and old.config.cluster_key == new.config.cluster_key:
            yield "cluster_key"

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
            self._admission.authenticator.replace(key_holders(now, self._ledger))
        self._admission.queue.resize(now.max_in_flight, now.max_queue, time.monotonic())


def _merged(old: DeploymentConfig, new: DeploymentConfig) -> DeploymentConfig:
    """With what is applied at once, and with the new settings of instances, which others look after."""
    return old.model_copy(update={**taken_over(old, new, "hot"), "instances": new.instances, "roles": new.roles})


def _is_read(path: str, settings: GatewaySettings) -> bool:
    """Whether this gateway looks at an option."""
    top = path.partition(".")[0]
    return (
        top in ("gateway", "trace", "cluster_key")
        or (top == "vllm" and settings.config.engine == "vllm")
        or (path == "slo.ttft_ms" and settings.gateway.shed)
    )


def _shown(config: DeploymentConfig, path: str) -> str:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return path if path in _SECRET else f"{path} = {value}"
