"""Takes a changed configuration over while requests run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from proxy.addresses import allowed_address
from proxy.endpoint import Endpoint
from proxy.entrance import key_holders
from proxy.fetch import MediaFetcher, UrlRules
from proxy.gate import Gate
from proxy.generation import Generator
from proxy.health import Health
from proxy.media import MediaLoader
from proxy.members import Members
from proxy.settings import GatewaySettings
from proxy.workers.ledger import Ledger

logger = logging.getLogger(__name__)

#: What a running gateway takes over; the rest needs another start.
RELOADED = frozenset(
    {
        "api_key",
        "api_keys",
        "max_body_bytes",
        "request_timeout_s",
        "max_in_flight",
        "max_queue",
        "queue_timeout_s",
        "failover",
        "health",
        "topology",
        "media",
        "max_items",
        "fetch_timeout_s",
        "allow_private",
        "allowed_domains",
        "allowed_ports",
        "allowed_file_dirs",
    }
)
#: Their values are not for the log.
_SECRET = frozenset({"api_key", "api_keys"})


class Control:
    """Of one gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        members: Members,
        gate: Gate,
        generator: Generator,
        health: Health,
        endpoints: Iterable[Endpoint],
        loader: MediaLoader,
        fetcher: MediaFetcher,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings = settings
        self._loader = loader
        self._fetcher = fetcher
        self._ledger = ledger
        self._members = members
        self._gate = gate
        self._generator = generator
        self._health = health
        self._endpoints = list(endpoints)

    def left_by(self, settings: GatewaySettings) -> list[str]:
        """What in other settings is not taken over by a running gateway."""
        return [name for name in self._changed(settings) if name not in RELOADED]

    def _changed(self, settings: GatewaySettings) -> list[str]:
        old = self.settings
        return [one.name for one in fields(old) if getattr(old, one.name) != getattr(settings, one.name)]

    def apply(self, settings: GatewaySettings, instances: Sequence[tuple[str, str]]) -> None:
        """From now on. Raises ValueError for instances that cannot be, and changes nothing then."""
        self._members.replace(instances)
        old, changed = self.settings, self._changed(settings)
        if left := self.left_by(settings):
            logger.warning("a change of %s needs another start of the gateway", ", ".join(left))
        taken = {name: getattr(settings, name) for name in changed if name in RELOADED}
        if not taken:
            return
        shown = (name if name in _SECRET else f"{name} = {value}" for name, value in taken.items())
        logger.info("changed: %s", ", ".join(shown))
        now = self.settings = replace(old, **taken)
        if not taken.keys().isdisjoint(_SECRET):
            self._gate.authenticator.replace(key_holders(now, self._ledger))
        self._gate.queue.resize(now.max_in_flight, now.max_queue, time.monotonic())
        self._gate.queue_timeout_s = now.queue_timeout_s
        self._generator.reconfigure(now.failover)
        self._health.reconfigure(now.health)
        self._loader.reconfigure(now.media, now.max_body_bytes, now.max_items)
        self._fetcher.reconfigure(
            max_bytes=now.media.max_bytes,
            timeout_s=now.fetch_timeout_s,
            allowed_address=allowed_address(allow_private=now.allow_private),
            allowed_file_dirs=now.allowed_file_dirs,
            rules=UrlRules(domains=now.allowed_domains, ports=now.allowed_ports),
        )
        for endpoint in self._endpoints:
            endpoint.reconfigure(max_body_bytes=now.max_body_bytes, timeout_s=now.request_timeout_s)
