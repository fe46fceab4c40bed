"""Load metrics under vLLM's names, for routers that read these."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge


class VllmGauges:
    """Running and waiting requests and KV usage under vLLM's own names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running = Gauge("vllm:num_requests_running", "Sequences being computed", registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Sequences and media that wait", registry=registry)
        self._kv_usage = Gauge(
            "vllm:kv_cache_usage_perc", "KV blocks in use, of the fullest instance; 1 means all", registry=registry
        )

    def set(self, num_running: int, num_waiting: int, kv_usage: float) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._kv_usage.set(kv_usage)
