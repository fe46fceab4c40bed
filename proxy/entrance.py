"""The gate as the gateway's settings have it."""

from __future__ import annotations

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import hash_key
from epd_serve.metrics.gateway import GatewayMetrics
from epd_serve.routing.first_token import first_token_s
from epd_serve.routing.table import InstanceTable
from proxy.admission import AdmissionQueue
from proxy.auth import Authenticator
from proxy.gate import Gate, Shedding
from proxy.limits import Client, KeyLimits
from proxy.settings import GatewaySettings
from proxy.workers.ledger import Ledger


def new_gate(
    settings: GatewaySettings, table: InstanceTable, metrics: GatewayMetrics, ledger: Ledger | None = None
) -> Gate:
    """The gate in front of the instances of ``table``; ``metrics`` show what it does. ``ledger``: where several
    workers count what keys have used."""
    queue = AdmissionQueue(settings.max_in_flight, settings.max_queue)
    metrics.watch_admission(lambda: queue.num_in_flight, lambda: queue.num_waiting)
    return Gate(
        Authenticator(key_holders(settings, ledger)),
        queue,
        queue_timeout_s=settings.queue_timeout_s,
        shedding=_shedding(settings, table),
        refused=lambda reason, key: metrics.refused.labels(reason, key).inc(),
        waited=metrics.queue_wait.observe,
    )


def key_holders(settings: GatewaySettings, ledger: Ledger | None = None) -> list[tuple[str, Client]]:
    """(hash, holder) of all API keys."""

    def holder(key: ApiKeyConfig) -> Client:
        limits = _limits(key)
        return Client(key.name, limits) if ledger is None else ledger.client(key.name, key.hash, limits)

    keys = [(key.hash, holder(key)) for key in settings.api_keys]
    if settings.api_key is not None:
        keys.append((hash_key(settings.api_key), Client("default")))
    return keys


def _limits(key: ApiKeyConfig) -> KeyLimits:
    return KeyLimits(
        requests_per_s=key.requests_per_s,
        burst=key.burst,
        tokens_per_min=key.tokens_per_min,
        max_concurrent=key.max_concurrent,
        highest_priority=key.highest_priority,
    )


def _shedding(settings: GatewaySettings, table: InstanceTable) -> Shedding | None:
    if settings.shed_ttft_s is None:
        return None
    return Shedding(
        ttft_s=settings.shed_ttft_s,
        pending_s=lambda num_tokens, has_media: first_token_s(table, num_tokens, has_media=has_media),
    )
