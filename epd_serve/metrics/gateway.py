"""Prometheus metrics of one gateway, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: Seconds; from a cached answer of a tiny model to a long generation on a busy device.
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """Names start with ``epd_serve_``; times are in seconds, as the client would see them at the gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "epd_serve_requests",
            "Finished requests; status 499: the client left, 599: broken off after the first token",
            ("endpoint", "status", "modality"),
            registry=self.registry,
        )
        self.ttft = Histogram(
            "epd_serve_ttft_seconds",
            "From the request's arrival to the first token of a streamed answer",
            ("endpoint", "modality"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "epd_serve_e2e_seconds",
            "From the request's arrival to the end of a complete answer",
            ("endpoint", "modality"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.encode_retries = Counter(
            "epd_serve_encode_retries",
            "Encode calls that were sent to another instance after a failure",
            registry=self.registry,
        )
        self.request_retries = Counter(
            "epd_serve_request_retries",
            "Requests that were sent to other instances after a failure before the first token",
            registry=self.registry,
        )
        self.request_continuations = Counter(
            "epd_serve_request_continuations",
            "Streamed answers that went on at other instances after a failure in their middle",
            registry=self.registry,
        )
        self.media_bytes = Counter(
            "epd_serve_media_bytes",
            "Bytes of decoded media received or fetched",
            ("modality",),
            registry=self.registry,
        )
        self.refused = Counter(
            "epd_serve_refused",
            "Requests turned away before they ran, by the error's code and the name of the API key",
            ("reason", "key"),
            registry=self.registry,
        )
        self.queue_wait = Histogram(
            "epd_serve_queue_wait_seconds",
            "Time in the admission queue of the requests that had to wait",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._admitted = Gauge(
            "epd_serve_requests_running", "Requests that were let to the instances", registry=self.registry
        )
        self._queued = Gauge(
            "epd_serve_requests_waiting", "Requests in the admission queue", registry=self.registry
        )
        self._in_flight = Gauge(
            "epd_serve_in_flight_calls",
            "Open stage calls of this gateway",
            ("instance", "stage"),
            registry=self.registry,
        )
        self._ready = Gauge(
            "epd_serve_instance_ready",
            "1 where the instance takes work",
            ("instance",),
            registry=self.registry,
        )

    def watch_admission(self, num_running: Callable[[], float], num_waiting: Callable[[], float]) -> None:
        """Where the gauges of the admission queue look when they are asked."""
        self._admitted.set_function(num_running)
        self._queued.set_function(num_waiting)

    def render(self, instances: Iterable[tuple[str, bool, Iterable[tuple[str, int]]]]) -> bytes:
        """The exposition text; ``instances`` gives (name, ready, [(stage, open calls), ...]) as of now."""
        for name, ready, stages in instances:
            self._ready.labels(name).set(ready)
            for stage, value in stages:
                self._in_flight.labels(name, stage).set(value)
        return generate_latest(self.registry)
