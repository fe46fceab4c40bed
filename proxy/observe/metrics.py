"""Prometheus metrics of one gateway, in its own registry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from epd_serve.routing.table import InstanceRecord
from epd_serve.telemetry.metrics import VllmGauges
from epd_serve.types import Stage
from proxy.observe.record import SOURCES, STAGES, RequestRecord

#: From a cached answer of a tiny model to a long generation on a busy device.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_CLIENT_LEFT = 499  # proxy/api/endpoint.py


class GatewayMetrics:
    """Metrics named ``epd_serve_...``; times are seconds as seen by a client at the gateway.

    After the prefix, vLLM's names (such as ``time_to_first_token_seconds``) have vLLM's meaning.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"epd_serve_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"epd_serve_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"epd_serve_{name}", text, labels, buckets=buckets, registry=registry)

        kind = ("endpoint", "modality")
        self._requests = counter(
            "requests",
            "Finished requests; status 499: the client disconnected, 599: failed after the first token",
            "endpoint",
            "status",
            "modality",
        )
        self._success = counter(
            "request_success",
            "Finished generations by reason; abort: the client disconnected; error: an error was returned",
            "finished_reason",
        )
        ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token of a streamed answer", _SECONDS, *kind
        )
        e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a complete answer", _SECONDS, *kind
        )
        tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a streamed answer's tokens after the first",
            _TOKEN_SECONDS,
            *kind,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between streamed tokens at the gateway, sampled from one answer in 32",
            _TOKEN_SECONDS,
        )
        stages = histogram(
            "stage_seconds",
            "From a stage's call to its answer, including waiting at the instance; queue: before the first call",
            _SECONDS,
            "stage",
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, including media")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in P's prefix cache")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in P's prefix cache")
        self._generation_tokens = counter("generation_tokens", "Answer tokens")
        self._features = counter(
            "features",
            "Media items by source of their features: encoded, store (the encoder's), prefill (already at P), "
            "recomputed (at P, because no encoder was available)",
            "source",
        )
        self._mm_queries = counter("mm_cache_queries", "Media items looked up")
        self._mm_hits = counter("mm_cache_hits", "Media items whose features were in a cache")
        self._media_bytes = counter("media_bytes", "Bytes of media received or fetched", "modality")
        self._queue_wait = histogram(
            "request_queue_time_seconds", "Time in the admission queue, of requests that waited", _SECONDS
        )
        self._encode_retries = counter("encode_retries", "Encode calls retried elsewhere after a failure")
        self._retries = counter(
            "request_retries", "Requests retried elsewhere after a failure before the first token"
        )
        self._continuations = counter(
            "request_continuations", "Streamed answers continued at other instances after a failure"
        )
        self._refused = counter(
            "refused", "Requests refused by admission, by error code and key name", "reason", "key"
        )
        self._running = gauge("num_requests_running", "Requests admitted to the instances")
        self._waiting = gauge("num_requests_waiting", "Requests in the admission queue")
        self._in_flight = gauge("in_flight_calls", "Open stage calls of this gateway", "instance", "stage")
        self._ready = gauge("instance_ready", "1 if the instance accepts requests", "instance")
        self._pending = gauge("pending_seconds", "Estimated waiting work at an instance", "instance", "stage")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use", "instance")
        self._sequences = gauge(
            "instance_requests", "Sequences at an instance, from all gateways", "instance", "state"
        )
        self._vllm = VllmGauges(registry)
        #: cached, because looking up labels costs more than counting
        self._times = cache(lambda *kind: (ttft.labels(*kind), e2e.labels(*kind), tpot.labels(*kind)))
        for reason in ("stop", "length", "tool_calls", "abort", "error"):
            self._success.labels(reason)
        self._by_stage = {stage: stages.labels(stage) for stage in STAGES}
        for source in SOURCES:
            self._features.labels(source)

    def put(self, record: RequestRecord) -> None:
        """Count a finished request."""
        status = record.status
        ttft, e2e, tpot = self._times(record.endpoint, record.modality)
        self._requests.labels(record.endpoint, str(status), record.modality).inc()
        if status == 200:
            e2e.observe(record.duration_s)
        reason = "abort" if status == _CLIENT_LEFT else "error" if status >= 500 else record.finish_reason
        if reason:
            self._success.labels(reason).inc()
        if record.ttft_s is not None:
            ttft.observe(record.ttft_s)
        if record.tpot_s is not None:
            tpot.observe(record.tpot_s)
        if record.prompt_tokens is not None:
            self._prompt_tokens.inc(record.prompt_tokens)
            if record.cached_tokens is not None:
                self._prefix_queries.inc(record.prompt_tokens)
                self._prefix_hits.inc(record.cached_tokens)
        if record.output_tokens is not None:
            self._generation_tokens.inc(record.output_tokens)
        if status == 429 and record.prefill is None:
            self._refused.labels(record.error, record.key).inc()
        if record.queue_s:
            self._queue_wait.observe(record.queue_s)
        if record.retries or record.continuations or record.encode_retries:
            self._retries.inc(record.retries)
            self._continuations.inc(record.continuations)
            self._encode_retries.inc(record.encode_retries)
        for span in record.spans:
            self._by_stage[span.name].observe(span.end_s - span.start_s)
            if source := str(span.attributes.get("feature", "")):
                self._features.labels(source).inc()
                self._mm_queries.inc()
                self._mm_hits.inc(source in ("store", "prefill"))
        for modality, nbytes in record.media_bytes.items():
            self._media_bytes.labels(modality).inc(nbytes)

    def render(self, instances: Iterable[InstanceRecord], num_running: int, num_waiting: int) -> bytes:
        """Return the exposition text with the current state of ``instances`` and of the admission queue."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        for gauge in (self._ready, self._in_flight, self._pending, self._kv_usage, self._sequences):
            gauge.clear()  # drop instances that have left
        all_running, all_waiting, most_used = 0, 0, 0.0
        for record in instances:
            name, running, waiting = record.name, 0, 0
            self._ready.labels(name).set(record.ready)
            for stage, count in record.in_flight.items():
                self._in_flight.labels(name, stage.value).set(count)
            if record.ready:
                load = record.load
                running, waiting = load.num_running, load.num_waiting + load.num_waiting_encodes
                for stage, seconds in pending_s(record).items():
                    self._pending.labels(name, stage.value).set(seconds)
                if (used := kv_usage(record)) is not None:
                    self._kv_usage.labels(name).set(used)
                    most_used = max(most_used, used)
            self._sequences.labels(name, "running").set(running)
            self._sequences.labels(name, "waiting").set(waiting)
            all_running, all_waiting = all_running + running, all_waiting + waiting
        self._vllm.set(all_running, all_waiting, most_used)
        return generate_latest(self.registry)


def pending_s(record: InstanceRecord) -> dict[Stage, float]:
    """Return the estimated waiting work of an instance by stage; for D, the time until KV has room."""
    seconds = {Stage.ENCODE: record.encode_s, Stage.PREFILL: record.prefill_s, Stage.DECODE: record.room_s(1)}
    return {stage: value for stage, value in seconds.items() if stage in record.stages}


def kv_usage(record: InstanceRecord) -> float | None:
    """Return the share of an instance's KV blocks in use; None without KV."""
    total = record.load.total_blocks
    return round((total - record.load.free_blocks) / total, 4) if total else None
