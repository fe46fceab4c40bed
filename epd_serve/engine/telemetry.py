"""Measurements of an instance: spans and their subscribers, Prometheus metrics, rates of its stages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from epd_serve.config.sections import FeatureStoreKind
from epd_serve.engine.device_board import Slack
from epd_serve.protocol.instance_state import Load
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import SequenceState
from epd_serve.telemetry.metrics import VllmGauges
from epd_serve.telemetry.otel import StageExport, span_export
from epd_serve.telemetry.span import FEATURE_WAIT, STAGES, Span, SpanStream, Timeline, Value
from epd_serve.telemetry.trace_file import TraceWriter
from epd_serve.transfer.grouping import TimeEstimate
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.types import Stage, StageRate

#: Kinds of preparation (:class:`~epd_serve.instance.text.request_processor.RequestProcessor`).
Kind = Literal["text", "media", "grammar"]

_PREFIX = "epd_serve_instance_"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
_STEPS = ("decode", "prefill", "mixed")
_KINDS: tuple[str, ...] = get_args(Kind)
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
#: Seconds without work after which a rate is stale, since the machine's load may have changed.
_FRESH_S = 60.0
#: Ignore steps with fewer prompt tokens (probes, prompts mostly in the cache), dominated by fixed cost.
_FEWEST_TOKENS = 16
#: Weight of a new sequence in the mean output length, and of a new prompt in the mean tokens per character.
_GAIN = 0.05
#: Decay of a batch's weight with each later batch: about the last twenty count.
_MEMORY = 0.95
#: Clip a batch's time to this factor above or below the expected time, to limit noise from other processes.
_OUTLIER = 4.0


class InstanceTelemetry:
    """All measurements of an instance: metrics and traces subscribe to spans of stages, steps and batches."""

    def __init__(
        self, name: str, *, stores: tuple[FeatureStoreKind, ...] = ("embedded",), trace: Path | None = None
    ) -> None:
        self.metrics = InstanceMetrics(stores)
        self.spans = SpanStream()
        self.timeline = Timeline(time.monotonic, self.spans.put)
        self.rates = StageRates(time.monotonic)
        self._trace = None if trace is None else TraceWriter(trace, name)
        export = span_export(name)
        self._export = None if export is None else StageExport(export, name)
        for subscriber in (self.metrics, self._trace, self._export):
            if subscriber is not None:
                self.spans.subscribe(subscriber.put)

    def add_call(self, request_id: str, traceparent: str, item: str = "") -> None:
        """Record which trace a stage call belongs to; ``item`` is the mm_hash of an encode."""
        if self._export is not None:
            self._export.received(request_id, traceparent, item)

    def add_batch(self, num_images: int, num_pixels: int, start_s: float, end_s: float, busy_s: float) -> None:
        """Record a tower batch, which kept the encoder busy for ``busy_s``. Call it on the tower's thread."""
        about: dict[str, Value] = {"track": "tower", "images": num_images, "pixels": num_pixels}
        self.spans.put(Span("encode", "", start_s, end_s, about))
        self.rates.encoded(num_pixels, busy_s)

    def add_step(self, output: ScheduleOutput, seconds: float) -> None:
        """Record a finished language model step. Call it on the engine's thread."""
        end_s = time.monotonic()
        self.timeline.record_step(
            ((one.request_id, one.num_computed >= len(one.prompt_ids)) for one, _ in output.prefills),
            (one.request_id for one in output.decodes),
            end_s - seconds,
            end_s,
        )
        kind = "decode" if not output.prefills else "mixed" if output.decodes else "prefill"
        about: dict[str, Value] = {
            "track": "engine",
            "decodes": len(output.decodes),
            "prefills": len(output.prefills),
            "prefill_tokens": output.num_tokens - len(output.decodes),
            "preempted": len(output.preempted),
        }
        self.spans.put(Span(kind, "", end_s - seconds, end_s, about))
        self.rates.stepped(output, seconds)

    async def close(self) -> None:
        """Flush and close traces and exports."""
        if self._trace is not None:
            self._trace.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)


class StageRates:
    """Rates of the stages, and mean lengths of answers and prompts.

    Each method is called on only one thread; readers may see values from the batch before.

    Attributes:
        mean_output_tokens: recent mean over finished sequences; 0 before the first.
        tokens_per_character: recent mean over prompts, without media; 0 before the first.
        busy_s: compute seconds by stage letter; a step with prompts counts as prefill.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fits = {stage: TimeEstimate(memory=_MEMORY, outlier=_OUTLIER) for stage in Stage}
        self._measured_s = dict.fromkeys(Stage, 0.0)
        self.mean_output_tokens = 0.0
        self.tokens_per_character = 0.0
        self.busy_s = {stage.value: 0.0 for stage in Stage}

    def report(self) -> dict[str, StageRate]:
        """Return the rates by stage, without stages that have not run yet."""
        now = self._clock()
        return {
            stage.value: StageRate(fit.base_s, fit.slope_s, is_fresh=now - self._measured_s[stage] < _FRESH_S)
            for stage, fit in self._fits.items()
            if fit.is_known
        }

    def encoded(self, num_pixels: int, seconds: float) -> None:
        """Record an encode batch and the time it kept the encoder busy. Call it on the tower's thread."""
        self.busy_s[Stage.ENCODE] += seconds
        self._fits[Stage.ENCODE].observe(num_pixels, seconds)
        self._measured_s[Stage.ENCODE] = self._clock()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Record a finished step. Call it on the engine's thread.

        A mixed step counts as prefill, minus the expected time of its decodes.
        """
        num_decodes = len(output.decodes)
        stage = Stage.PREFILL if output.prefills else Stage.DECODE
        self.busy_s[stage] += seconds
        units = num_decodes
        if stage is Stage.PREFILL:
            units = output.num_tokens - num_decodes
            seconds -= self._fits[Stage.DECODE].slope_s * num_decodes
        if seconds > 0 and (stage is Stage.DECODE or units >= _FEWEST_TOKENS):
            self._fits[stage].observe(units, seconds)
            self._measured_s[stage] = self._clock()
        for sequence in output.decodes:
            if sequence.state is SequenceState.FINISHED and not sequence.is_cancelled:
                self.mean_output_tokens = _move_towards(self.mean_output_tokens, len(sequence.output_ids))

    def prompted(self, num_characters: int, num_tokens: int) -> None:
        """Record a prompt's number of text tokens, without media. Call it on the tokenization thread."""
        if num_characters:
            self.tokens_per_character = _move_towards(self.tokens_per_character, num_tokens / num_characters)


def _move_towards(mean: float, value: float) -> float:
    return mean + _GAIN * (value - mean) if mean else float(value)


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
        self._store_held = gauge("store_held_bytes", "Bytes of features in this instance's own memory")
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
