"""Prometheus metrics of one instance, in a registry of its own."""

from __future__ import annotations

from itertools import product
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from epd_serve.config.sections import FeatureStoreKind
from epd_serve.instance.feature_receiver import FetchTiming
from epd_serve.instance.text.request_processor import Kind
from epd_serve.protocol.instance_state import Load
from epd_serve.sched.token_time import Slack
from epd_serve.telemetry.metrics import VllmGauges
from epd_serve.telemetry.span import FEATURE_WAIT, STAGES, Span
from epd_serve.transfer.kv_sender import OutgoingTransfer

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_STEPS = ("decode", "prefill", "mixed")
_KINDS: tuple[str, ...] = get_args(Kind)
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class InstanceMetrics:
    """Names start with ``epd_serve_instance_``, but for :class:`VllmGauges`. Subscribes to the instance's spans.

    The overlap ratio of a transfer is the share of its time in which the request did not wait for it: for KV, the
    part before its prompt was computed; for a feature, the part before the engine could have computed with it.

    Every series but those of links is there from the start, at 0, so that what has not happened yet is no gap.

    Args:
        stores: the feature stores that will tell what they do.
    """

    def __init__(self, stores: tuple[FeatureStoreKind, ...] = ("embedded",)) -> None:
        self.registry = CollectorRegistry()
        self._paused_s = 0.0
        self._stages = self._histogram(
            "stage_seconds",
            "Time of requests in each stage (telemetry/span)",
            _SECONDS,
            stage=(*STAGES, FEATURE_WAIT),
        )
        self._preparation = self._histogram(
            "preparation_seconds",
            "Waiting for and work of tokenising and image preprocessing",
            _SECONDS,
            kind=_KINDS,
        )
        self._kv_bytes = self._counter("kv_bytes", "KV bytes read from other instances")
        self._kv_seconds = self._counter("kv_seconds", "Time of reads of KV")
        self._kv_announcements = self._counter("kv_announcements", "Groups of layers that were announced and read")
        self._kv_requests = self._counter("kv_requests", "Requests whose KV was handed over")
        self._kv_request_bytes = self._counter("kv_request_bytes", "KV bytes of requests that were handed over")
        self._kv_request_seconds = self._counter("kv_request_seconds", "Time of their transfers")
        self._kv_exposed = self._counter("kv_exposed_seconds", "Part of that after their prompts were computed")
        self._kv_overlap = self._histogram("kv_overlap_ratio", "Hidden share of a request's KV transfer", _RATIOS)
        self._kv_wait = self._histogram("kv_wait_seconds", "From a prompt's end to its last KV byte", _SECONDS)
        self._kv_handshake = self._gauge("kv_handshake_seconds", "Estimate of what each write costs", link=())
        self._kv_bandwidth = self._gauge("kv_bandwidth_bytes_per_second", "Estimate for each link", link=())
        self._feature_bytes = self._counter("feature_bytes", "Feature bytes fetched and used")
        self._feature_transmission = self._histogram(
            "feature_transmission_seconds", "From a feature's event to the feature", _SECONDS
        )
        self._feature_scheduling = self._histogram(
            "feature_scheduling_seconds", "From a feature's event to when it could have been used", _SECONDS
        )
        self._feature_exposed = self._counter("feature_exposed_seconds", "Transmission that requests waited for")
        self._feature_overlap = self._histogram(
            "feature_overlap_ratio", "Hidden share of a feature's transmission", _RATIOS
        )
        self._feature_arrivals = self._counter(
            "feature_arrivals",
            "Fetched features by their first use: in_time, or late and waited for",
            arrival=("in_time", "late"),
        )
        self._feature_recomputes = self._counter(
            "feature_recomputes", "Features encoded here because no encoder could deliver them"
        )
        self._feature_producers = self._counter(
            "feature_producers",
            "Announced features by the kind of device and the operators that made them",
            producer=(),
        )
        self._encodes = self._counter(
            "encodes", "Encode calls; cached: the store had the feature", cached=("false", "true")
        )
        self._tower_images = self._counter("tower_images", "Images that went through the tower")
        self._tower_pixels = self._counter("tower_pixels", "Their pixels")
        self._tower_seconds = self._counter("tower_seconds", "Time of their computation")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found there")
        self._prefix_told = (0, 0)
        self._store_owners = self._gauge("store_owners", "Requests that hold features in the store")
        self._store_held = self._gauge("store_held_bytes", "Bytes of this instance's features in the store")
        self._store_counts = {
            operation: self._counter(f"store_{name}", text, store=stores)
            for operation, name, text in (
                ("hit", "hits", "Features asked for before they are encoded, and found"),
                ("miss", "misses", "Features asked for before they are encoded, and not found"),
                ("put", "puts", "Features put"),
                ("evict", "evictions", "Features evicted to make room"),
                ("fetch", "fetches", "Features fetched and verified"),
                ("lost", "fetch_failures", "Announced features that were gone, broken or too slow to come"),
            )
        }
        self._store_bytes = {
            operation: self._counter(f"store_{operation}_bytes", text, store=stores)
            for operation, text in (("put", "Feature bytes put"), ("fetch", "Feature bytes fetched"))
        }
        self._store_seconds = {
            operation: self._histogram(f"store_{operation}_seconds", text, _SECONDS, store=stores)
            for operation, text in (("put", "Time of a put"), ("fetch", "Time of a fetch"))
        }
        self._steps = self._counter("steps", "Steps of the language model", kind=_STEPS)
        self._step_seconds = self._counter("step_seconds", "Time of steps", kind=_STEPS)
        self._step_tokens = self._counter("step_tokens", "Tokens computed", stage=("decode", "prefill"))
        self._preemptions = self._counter(
            "preemptions", "Sequences that gave their blocks to older ones for a while"
        )
        self._encode_paused = self._counter(
            "encode_paused_seconds", "Time for which encodes waited in their middle for decodes"
        )
        self._token_time = self._gauge(
            "token_time_seconds",
            "Decodes under a limit. limit: of the time per token; credit: what steps may still take beyond it; "
            "alone, beside: mean time per token without and beside an encode, 0 while there was none",
            part=(),
        )
        self._as_vllm = VllmGauges(self.registry)
        self._load = {
            name: self._gauge(name, text)
            for name, text in (
                ("num_running", "Sequences that hold blocks and are computed"),
                ("num_waiting", "Sequences without blocks"),
                ("num_waiting_tokens", "Prompt tokens to be computed"),
                ("num_waiting_encodes", "Media to be encoded"),
                ("free_blocks", "KV blocks that nobody holds"),
                ("total_blocks", "KV blocks"),
            )
        }

    # ------------------------------------------------------------------ told by the parts; any thread

    def put(self, span: Span) -> None:
        """Count a request's stage, a step of the language model, a batch of the tower, or a preparation."""
        name, about, seconds = span.name, span.attributes, span.end_s - span.start_s
        if span.request_id:
            self._stages.labels(name).observe(seconds)
        elif name in _STEPS:
            self._steps.labels(name).inc()
            self._step_seconds.labels(name).inc(seconds)
            self._step_tokens.labels("decode").inc(float(about["decodes"]))
            self._step_tokens.labels("prefill").inc(float(about["prefill_tokens"]))
            self._preemptions.inc(float(about["preempted"]))
        elif name in _KINDS:
            self._preparation.labels(name).observe(seconds + float(about["waited_s"]))
        else:
            self._tower_images.inc(float(about["images"]))
            self._tower_pixels.inc(float(about["pixels"]))
            self._tower_seconds.inc(seconds)

    def kv_read(self, nbytes: int, seconds: float) -> None:
        """A decode instance has read KV; the prefill instance counts what of that was hidden."""
        self._kv_bytes.inc(nbytes)
        self._kv_seconds.inc(seconds)

    def kv_delivered(self, transfer: OutgoingTransfer) -> None:
        self._kv_requests.inc()
        if transfer.num_announcements:
            self._kv_announcements.inc(transfer.num_announcements)
            self._kv_request_bytes.inc(transfer.num_bytes)
            self._kv_request_seconds.inc(transfer.transfer_s)
            self._kv_exposed.inc(transfer.exposed_s)
            self._kv_overlap.observe(transfer.overlap_ratio)
            self._kv_wait.observe(transfer.wait_s)

    def feature_used(self, timing: FetchTiming) -> None:
        self._feature_bytes.inc(timing.nbytes)
        self._feature_transmission.observe(timing.transmission_s)
        self._feature_scheduling.observe(timing.scheduling_s)
        self._feature_exposed.inc(timing.exposed_s)
        self._feature_overlap.observe(timing.overlap_ratio)
        self._feature_arrivals.labels("late" if timing.exposed_s else "in_time").inc()

    def encoded(self, cached: bool, *, instead: bool = False) -> None:
        """``instead``: by an instance that is not meant to, because no encoder could deliver."""
        self._encodes.labels(str(cached).lower()).inc()
        if instead and not cached:
            self._feature_recomputes.inc()

    def feature_came(self, producer: str) -> None:
        """Count a feature that was announced, by the kind of device and the operators that made it."""
        self._feature_producers.labels(producer).inc()

    def store_did(self, store: str, operation: str, nbytes: int = 0, seconds: float = 0.0) -> None:
        """A :class:`epd_serve.transfer.feature_store.StoreObserver`."""
        self._store_counts[operation].labels(store).inc()
        if operation in self._store_bytes:
            self._store_bytes[operation].labels(store).inc(nbytes)
            self._store_seconds[operation].labels(store).observe(seconds)

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        """Prompt tokens looked up in the prefix cache, and found there, in all."""
        queries, hits = self._prefix_told
        self._prefix_queries.inc(num_tokens - queries)
        self._prefix_hits.inc(num_found - hits)
        self._prefix_told = (num_tokens, num_found)

    def paced(self, paused_s: float, slack: Slack | None) -> None:
        """Before :meth:`render`.

        Args:
            paused_s: seconds for which encodes have waited in their middle for decodes, in all.
            slack: of the decodes; None without a limit on their time per token.
        """
        self._encode_paused.inc(max(paused_s - self._paused_s, 0.0))
        self._paused_s = paused_s
        if slack is not None:
            parts = {
                "limit": slack.limit_s,
                "credit": slack.credit_s,
                "alone": slack.alone_s,
                "beside": slack.beside_s,
            }
            for part, seconds in parts.items():
                self._token_time.labels(part).set(seconds)

    # ------------------------------------------------------------------ asked for

    def render(self, load: Load, store: tuple[int, int], links: dict[str, tuple[float, float]]) -> bytes:
        """The exposition text as of now.

        Args:
            store: owners and bytes in the feature store.
            links: (handshake seconds, bytes per second) by region.
        """
        for name, gauge in self._load.items():
            gauge.set(getattr(load, name))
        used = load.total_blocks - load.free_blocks
        waiting = load.num_waiting + load.num_waiting_encodes
        self._as_vllm.set(load.num_running, waiting, used / load.total_blocks if load.total_blocks else 0.0)
        self._store_owners.set(store[0])
        self._store_held.set(store[1])
        for gauge in (self._kv_handshake, self._kv_bandwidth):
            gauge.clear()
        for link, (handshake_s, bytes_per_s) in links.items():
            self._kv_handshake.labels(link).set(handshake_s)
            self._kv_bandwidth.labels(link).set(bytes_per_s)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, **labels: tuple[str, ...]) -> Counter:
        return _at_0(Counter(f"epd_serve_instance_{name}", text, tuple(labels), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, **labels: tuple[str, ...]) -> Gauge:
        return _at_0(Gauge(f"epd_serve_instance_{name}", text, tuple(labels), registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> Histogram:
        metric = Histogram(
            f"epd_serve_instance_{name}", text, tuple(labels), buckets=buckets, registry=self.registry
        )
        return _at_0(metric, labels)


def _at_0(metric: _Metric, labels: dict[str, tuple[str, ...]]) -> _Metric:
    """The metric with a series for each value that its labels can take."""
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric
