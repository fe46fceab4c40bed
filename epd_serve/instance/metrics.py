"""Prometheus metrics of one instance, in a registry of its own."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from epd_serve.config.sections import FeatureStoreKind
from epd_serve.engine.device_board import Slack
from epd_serve.instance.text.request_processor import Kind
from epd_serve.protocol.instance_state import Load
from epd_serve.telemetry.metrics import VllmGauges
from epd_serve.telemetry.span import FEATURE_WAIT, STAGES, Span
from epd_serve.transfer.kv_sender import OutgoingTransfer

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "epd_serve_instance_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_STEPS = ("decode", "prefill", "mixed")
_KINDS: tuple[str, ...] = get_args(Kind)
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class InstanceMetrics:
    """Prometheus metrics, named ``epd_serve_instance_...`` except for :class:`VllmGauges`; subscribes to spans.

    The overlap ratio of a transfer is the share of its time during which the request did not wait for it: for KV,
    the part before the end of the prompt; for a feature, the part before the engine could have used it.

    All series except those of links exist from the start at 0, so that graphs are continuous.
    """

    def __init__(self, stores: tuple[FeatureStoreKind, ...] = ("embedded",)) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, seconds = self._counter, self._gauge, partial(self._histogram, _SECONDS)
        ratio = partial(self._histogram, _RATIOS)
        self._stages = seconds(
            "stage_seconds", "Time that requests spend in each stage", stage=(*STAGES, FEATURE_WAIT)
        )
        self._preparation = seconds(
            "preparation_seconds", "Waiting and working time of request preparation", kind=_KINDS
        )
        self._kv_bytes = counter("kv_bytes", "KV bytes read from other instances")
        self._kv_seconds = counter("kv_seconds", "Time spent reading KV")
        self._kv_announcements = counter("kv_announcements", "Groups of layers announced and read")
        self._kv_requests = counter("kv_requests", "Requests whose KV was handed over")
        self._kv_request_bytes = counter("kv_request_bytes", "KV bytes of requests handed over")
        self._kv_request_seconds = counter("kv_request_seconds", "KV transfer time of requests handed over")
        self._kv_exposed = counter("kv_exposed_seconds", "KV transfer time after the end of the prompt")
        self._kv_overlap = ratio("kv_overlap_ratio", "Hidden share of a request's KV transfer")
        self._kv_wait = seconds("kv_wait_seconds", "From a prompt's end to its last KV byte")
        self._kv_handshake = gauge("kv_handshake_seconds", "Estimated fixed cost of a KV read", link=())
        self._kv_bandwidth = gauge("kv_bandwidth_bytes_per_second", "Estimated link bandwidth", link=())
        self._feature_bytes = counter("feature_bytes", "Feature bytes fetched and used")
        self._feature_transmission = seconds(
            "feature_transmission_seconds", "From a feature's event to its arrival"
        )
        self._feature_scheduling = seconds(
            "feature_scheduling_seconds", "From a feature's event to the time the engine could use it"
        )
        self._feature_exposed = counter("feature_exposed_seconds", "Transmission time that requests waited for")
        self._feature_overlap = ratio("feature_overlap_ratio", "Hidden share of a feature's transmission")
        self._feature_arrivals = counter(
            "feature_arrivals",
            "Fetched features at first use: in_time, or late if a request waited",
            arrival=("in_time", "late"),
        )
        self._feature_recomputes = counter(
            "feature_recomputes", "Features encoded here because no encoder could deliver them"
        )
        self._feature_producers = counter(
            "feature_producers",
            "Announced features by the kind of device and operators that computed them",
            producer=(),
        )
        self._encodes = counter(
            "encodes", "Encode calls; cached: the store had the feature", cached=("false", "true")
        )
        self._tower_images = counter("tower_images", "Images encoded by the tower")
        self._tower_pixels = counter("tower_pixels", "Pixels encoded by the tower")
        self._tower_seconds = counter("tower_seconds", "Compute time of the tower")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._store_owners = gauge("store_owners", "Requests that hold features in the store")
        self._store_held = gauge("store_held_bytes", "Bytes of this instance's features in the store")
        self._store_counts = {
            operation: counter(f"store_{name}", text, store=stores)
            for operation, name, text in (
                ("hit", "hits", "Lookups before an encode that found the feature"),
                ("miss", "misses", "Lookups before an encode that did not find the feature"),
                ("put", "puts", "Features stored"),
                ("evict", "evictions", "Features evicted to make room"),
                ("fetch", "fetches", "Features fetched and verified"),
                ("lost", "fetch_failures", "Announced features that were lost, corrupt or too slow"),
            )
        }
        self._store_bytes = {
            operation: counter(f"store_{operation}_bytes", f"Feature bytes per {operation}", store=stores)
            for operation in ("put", "fetch")
        }
        self._store_seconds = {
            operation: seconds(f"store_{operation}_seconds", f"Time of a {operation}", store=stores)
            for operation in ("put", "fetch")
        }
        self._steps = counter("steps", "Steps of the language model", kind=_STEPS)
        self._step_seconds = counter("step_seconds", "Time of steps", kind=_STEPS)
        self._step_tokens = counter("step_tokens", "Tokens computed", stage=("decode", "prefill"))
        self._preemptions = counter("preemptions", "Sequences that lost their blocks to older ones")
        self._encode_paused = counter(
            "encode_paused_seconds", "Time that encodes paused between layers for decodes"
        )
        self._token_time = gauge(
            "token_time_seconds",
            "Decodes under a limit. limit: time per token; credit: time by which steps may still exceed it; "
            "alone, beside: mean time per token without and with a concurrent encode, 0 before the first",
            part=(),
        )
        self._totals: dict[Counter, float] = {}  # last totals of counters set by total
        self._as_vllm = VllmGauges(self.registry)
        self._load = {
            name: gauge(name, text)
            for name, text in (
                ("num_running", "Running sequences, which hold blocks"),
                ("num_waiting", "Sequences without blocks"),
                ("num_waiting_tokens", "Prompt tokens to compute"),
                ("num_waiting_encodes", "Media items to encode"),
                ("free_blocks", "Free KV blocks"),
                ("total_blocks", "KV blocks"),
            )
        }

    # ------------------------------------------------------------------ updates, from any thread

    def put(self, span: Span) -> None:
        """Record a span: a stage of a request, a language model step, a tower batch, or a preparation."""
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
        """Count KV read by this decode instance; the prefill instance measures the overlap."""
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

    def feature_used(self, nbytes: int, transmission_s: float, scheduling_s: float) -> None:
        """Record the times from a feature's event to its first use (EPD-Serve Table 3).

        Args:
            transmission_s: time from the event to the arrival of the feature.
            scheduling_s: time from the event until the engine could have used the feature.
        """
        exposed_s = max(transmission_s - scheduling_s, 0.0)
        self._feature_bytes.inc(nbytes)
        self._feature_transmission.observe(transmission_s)
        self._feature_scheduling.observe(scheduling_s)
        self._feature_exposed.inc(exposed_s)
        self._feature_overlap.observe(1.0 - exposed_s / transmission_s if transmission_s else 1.0)
        self._feature_arrivals.labels("late" if exposed_s else "in_time").inc()

    def encoded(self, cached: bool, *, instead: bool = False) -> None:
        """Count an encode call. ``instead``: run as a last resort, by an instance whose role does not encode."""
        self._encodes.labels(str(cached).lower()).inc()
        if instead and not cached:
            self._feature_recomputes.inc()

    def feature_came(self, producer: str) -> None:
        """Count an announced feature by the kind of device and operators that computed it."""
        self._feature_producers.labels(producer).inc()

    def store_did(self, store: str, operation: str, nbytes: int = 0, seconds: float = 0.0) -> None:
        """Record a store operation (:class:`epd_serve.transfer.feature_store.StoreObserver`)."""
        self._store_counts[operation].labels(store).inc()
        if operation in self._store_bytes:
            self._store_bytes[operation].labels(store).inc(nbytes)
            self._store_seconds[operation].labels(store).observe(seconds)

    # ------------------------------------------------------------------ output

    def render(
        self,
        load: Load,
        store: tuple[int, int],
        links: dict[str, tuple[float, float]],
        *,
        prefix_tokens: tuple[int, int] = (0, 0),
        paused_s: float = 0.0,
        slack: Slack | None = None,
    ) -> bytes:
        """Return the current metrics in Prometheus text format.

        Args:
            store: number of owners and bytes in the feature store.
            links: (handshake seconds, bytes per second) by region.
            prefix_tokens: total prompt tokens looked up and found in the prefix cache.
            paused_s: total seconds that encodes paused between layers for decodes.
            slack: slack of the decodes; None without a limit on their time per token.
        """
        totals = {self._prefix_queries: prefix_tokens[0], self._prefix_hits: prefix_tokens[1]}
        for counter, total in {**totals, self._encode_paused: paused_s}.items():
            counter.inc(max(total - self._totals.get(counter, 0.0), 0.0))
            self._totals[counter] = total
        if slack is not None:
            for part in ("limit", "credit", "alone", "beside"):
                self._token_time.labels(part).set(getattr(slack, f"{part}_s"))
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
        return _at_0(Counter(_PREFIX + name, text, tuple(labels), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, **labels: tuple[str, ...]) -> Gauge:
        return _at_0(Gauge(_PREFIX + name, text, tuple(labels), registry=self.registry), labels)

    def _histogram(self, buckets: tuple[float, ...], name: str, text: str, **labels: tuple[str, ...]) -> Histogram:
        metric = Histogram(_PREFIX + name, text, tuple(labels), buckets=buckets, registry=self.registry)
        return _at_0(metric, labels)


def _at_0(metric: _Metric, labels: dict[str, tuple[str, ...]]) -> _Metric:
    """Create a series for each combination of label values, and return the metric."""
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric
