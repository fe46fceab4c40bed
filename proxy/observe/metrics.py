"""Prometheus metrics of one gateway, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd_serve.routing.table import InstanceRecord
from epd_serve.telemetry.metrics import Counter, Histogram, VllmNames
from epd_serve.types import Stage
from proxy.observe.record import SOURCES, STAGES, RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
#: Seconds; from a cached answer of a tiny model to a long generation on a busy device.
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
_REASONS = ("stop", "length", "tool_calls", "abort", "error")
#: Of the client that left (proxy/api/endpoint.py).
_CLIENT_LEFT = 499


@dataclass(slots=True, eq=False)
class _Tallies(Collector):
    families: list[Histogram | Counter] = field(default_factory=list)

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            yield from family.collect()


class GatewayMetrics:
    """Names start with ``epd_serve_``; times are in seconds, as the client would see them at the gateway.

    Behind the prefix, vLLM's names (``vllm:time_to_first_token_seconds`` and so on) mean what they mean there.
    Three are there under vLLM's own prefix, too: the gateway as one server.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        #: Called before anything is shown: who tells late can do so now.
        self.before_render: Callable[[], None] = lambda: None
        self._tallies = _Tallies()
        endpoint = ("endpoint", "modality")
        self.requests = self._counter(
            "requests",
            "Finished requests; status 499: the client left, 599: broken off after the first token",
            ("endpoint", "status", "modality"),
        )
        self._success = self._counter(
            "request_success",
            "Finished generations by the reason: as the client was told; abort: it left; error: it got an error",
            ("finished_reason",),
            [(reason,) for reason in _REASONS],
        )
        self.ttft = self._histogram(
            ("time_to_first_token_seconds", "ttft_seconds"),
            "From the request's arrival to the first token of a streamed answer",
            _BUCKETS,
            endpoint,
        )
        self._e2e = self._histogram(
            ("e2e_request_latency_seconds", "e2e_seconds"),
            "From the request's arrival to the end of a complete answer",
            _BUCKETS,
            endpoint,
        )
        self._tpot = self._histogram(
            ("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
            "Mean time of a streamed answer's tokens after the first",
            _TOKEN_SECONDS,
            endpoint,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between the arrivals of streamed tokens at the gateway, of one answer in 32",
            _TOKEN_SECONDS,
        )
        self._stages = self._histogram(
            "stage_seconds",
            "From a stage's call to its answer, waiting at the instance included; queue: before the first call",
            _BUCKETS,
            ("stage",),
        )
        for stage in STAGES:
            self._stages.series(stage)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, media included")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers")
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Of each request", _TOKENS)
        self._request_generation_tokens = self._histogram("request_generation_tokens", "Of each request", _TOKENS)
        self._features = self._counter(
            "features",
            "Media items by where their features came from: encoded, store (of the encoder), prefill (it had "
            "them), recomputed (at P, for want of an encoder)",
            ("source",),
            [(source,) for source in SOURCES],
        )
        self._mm_queries = self._counter("mm_cache_queries", "Media items asked for")
        self._mm_hits = self._counter("mm_cache_hits", "Those whose features were in some cache")
        self.queue_wait = self._histogram(
            ("request_queue_time_seconds", "queue_wait_seconds"),
            "Time in the admission queue of the requests that had to wait",
            _BUCKETS,
        )
        self.registry.register(self._tallies)
        self.encode_retries = self._plain(
            "encode_retries", "Encode calls that were sent to another instance after a failure"
        )
        self.request_retries = self._plain(
            "request_retries", "Requests that were sent to other instances after a failure before the first token"
        )
        self.request_continuations = self._plain(
            "request_continuations",
            "Streamed answers that went on at other instances after a failure",
        )
        self.media_bytes = self._counter(
            "media_bytes", "Bytes of decoded media received or fetched", ("modality",)
        )
        self.refused = self._plain(
            "refused",
            "Requests turned away before they ran, by error code and key's name",
            "reason",
            "key",
        )
        self._running = self._gauges("Requests that were let to the instances", "running")
        self._waiting = self._gauges("Requests in the admission queue", "waiting")
        self._in_flight = self._gauge("in_flight_calls", "Open stage calls of this gateway", "instance", "stage")
        self._ready = self._gauge("instance_ready", "1 where the instance takes work", "instance")
        self._pending = self._gauge(
            "pending_seconds", "Estimate of the work that an instance has before it", "instance", "stage"
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 means all", "instance")
        self._sequences = self._gauge(
            "instance_requests", "Sequences at an instance, from all gateways", "instance", "state"
        )
        self._as_vllm = VllmNames(self.registry)
        self._log_lines = self._gauge("access_log_lines", "Lines written to the access log")
        self._log_dropped = self._gauge("access_log_dropped_lines", "Lines that it had no room for")

    # ------------------------------------------------------------------ told

    def finished(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        endpoint, modality, status = record.endpoint, record.modality, record.status
        tpot_s, prompt_tokens, output_tokens = record.tpot_s, record.prompt_tokens, record.output_tokens
        self.requests.add(1.0, endpoint, str(status), modality)
        if status == 200:
            self._e2e.observe(record.duration_s, endpoint, modality)
            if record.finish_reason:
                self._success.add(1.0, record.finish_reason)
        elif status == _CLIENT_LEFT:
            self._success.add(1.0, "abort")
        elif status >= 500:
            self._success.add(1.0, "error")
        if tpot_s is not None:
            self._tpot.observe(tpot_s, endpoint, modality)
        if prompt_tokens is not None:
            self._prompt_tokens.add(prompt_tokens)
            self._request_prompt_tokens.observe(prompt_tokens)
        if output_tokens is not None:
            self._generation_tokens.add(output_tokens)
            self._request_generation_tokens.observe(output_tokens)
        for span in record.spans:
            self._stages.observe(span.end_s - span.start_s, span.name)
        for kind, nbytes in record.media_bytes.items():
            self.media_bytes.add(nbytes, kind)
            for source in [one.attributes["feature"] for one in record.spans if "feature" in one.attributes]:
                self._features.add(1.0, str(source))
                self._mm_queries.add(1.0)
                if source in ("store", "prefill"):
                    self._mm_hits.add(1.0)

    def watch_admission(self, num_running: Callable[[], float], num_waiting: Callable[[], float]) -> None:
        """Let the gauges of the admission queue call these functions when they are read."""
        for gauges, look in ((self._running, num_running), (self._waiting, num_waiting)):
            for gauge in gauges:
                gauge.set_function(look)

    def watch_access_log(self, num_written: Callable[[], float], num_dropped: Callable[[], float]) -> None:
        self._log_lines.set_function(num_written)
        self._log_dropped.set_function(num_dropped)

    # ------------------------------------------------------------------ asked

    def render(self, instances: Iterable[InstanceRecord]) -> bytes:
        """The exposition text with ``instances`` as of now."""
        self._look_at(instances)
        return generate_latest(self.registry)

    def _look_at(self, instances: Iterable[InstanceRecord]) -> None:
        self.before_render()
        for gauge in (self._ready, self._in_flight, self._pending, self._kv_usage, self._sequences):
            gauge.clear()  # of instances that have left
        num_running, num_waiting, most_used = 0, 0, 0.0
        for record in instances:
            name, running, waiting = record.name, 0, 0
            self._ready.labels(name).set(record.ready)
            for stage, count in record.in_flight.items():
                self._in_flight.labels(name, stage.value).set(count)
            if record.ready:  # else what it reported before it was lost is over
                load = record.load
                running, waiting = load.num_running, load.num_waiting + load.num_waiting_encodes
                for stage, seconds in pending_s(record).items():
                    self._pending.labels(name, stage.value).set(seconds)
                if (used := kv_usage(record)) is not None:
                    self._kv_usage.labels(name).set(used)
                    most_used = max(most_used, used)
            self._sequences.labels(name, "running").set(running)
            self._sequences.labels(name, "waiting").set(waiting)
            num_running, num_waiting = num_running + running, num_waiting + waiting
        self._as_vllm.set(num_running, num_waiting, most_used)

    def _counter(self, name: str, text: str, *more: Any) -> Counter:
        counter = Counter(f"epd_serve_{name}", text, *more)
        self._tallies.families.append(counter)
        return counter

    def _histogram(
        self, names: str | Sequence[str], text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        names = [names] if isinstance(names, str) else names
        histogram = Histogram([f"epd_serve_{name}" for name in names], text, bounds, labels)
        self._tallies.families.append(histogram)
        return histogram

    def _plain(self, name: str, text: str, *labels: str) -> PrometheusCounter:
        return PrometheusCounter(f"epd_serve_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"epd_serve_{name}", text, labels, registry=self.registry)

    def _gauges(self, text: str, state: str) -> tuple[Gauge, Gauge]:
        """Two gauges of one figure: under vLLM's name, and under the name that it had here before."""
        return self._gauge(f"num_requests_{state}", text), self._gauge(f"requests_{state}", text)


def pending_s(record: InstanceRecord) -> dict[Stage, float]:
    """Estimates of an instance's work before it, by stage; of D: until there is room for KV."""
    seconds = {Stage.ENCODE: record.encode_s, Stage.PREFILL: record.prefill_s, Stage.DECODE: record.room_s(1)}
    return {stage: value for stage, value in seconds.items() if stage in record.stages}


def kv_usage(record: InstanceRecord) -> float | None:
    """Share of an instance's KV blocks that are in use; None where it has none."""
    total = record.load.total_blocks
    return round((total - record.load.free_blocks) / total, 4) if total else None
