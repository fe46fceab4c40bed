"""The gate as the gateway's settings have it."""

from __future__ import annotations

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import hash_key
from epd_serve.routing.first_token import first_token_s
from epd_serve.routing.table import InstanceTable
from epd_serve.telemetry.gateway import GatewayMetrics
from proxy.admission import AdmissionQueue
from proxy.auth import Authenticator
from proxy.gate import Gate, Shedding
from proxy.limits import Client
from proxy.settings import Current, GatewaySettings
from proxy.workers.ledger import Ledger


def new_gate(
    current: Current, table: InstanceTable, metrics: GatewayMetrics, ledger: Ledger | None = None
) -> Gate:
    """The gate in front of the instances of ``table``; ``metrics`` show what it does. ``ledger``: where several
    workers count what keys have used."""
    settings = current.now
    queue = AdmissionQueue(settings.max_in_flight, settings.max_queue)
    metrics.watch_admission(lambda: queue.num_in_flight, lambda: queue.num_waiting)
    return Gate(
        Authenticator(key_holders(settings, ledger)),
        queue,
        settings=current,
        shedding=_shedding(settings, table),
        refused=lambda reason, key: metrics.refused.labels(reason, key).inc(),
        waited=metrics.queue_wait.observe,
    )


def key_holders(settings: GatewaySettings, ledger: Ledger | None = None) -> list[tuple[str, Client]]:
    """(hash, holder) of all API keys."""

    def holder(key: ApiKeyConfig) -> Client:
        return Client(key.name, key) if ledger is None else ledger.client(key.name, key.hash, key)

    keys = [(key.hash, holder(key)) for key in settings.gateway.api_keys]
    if settings.api_key is not None:
        keys.append((hash_key(settings.api_key), Client("default")))
    return keys


def _shedding(settings: GatewaySettings, table: InstanceTable) -> Shedding | None:
    if settings.shed_ttft_s is None:
        return None
    return Shedding(
        ttft_s=settings.shed_ttft_s,
        pending_s=lambda num_tokens, has_media: first_token_s(table, num_tokens, has_media=has_media),
    )
