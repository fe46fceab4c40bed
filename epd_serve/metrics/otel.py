"""Spans for OpenTelemetry: recorded when they are over, exported in the background as the OTEL_* environment says.

The packages are the extra ``[otel]``. Nothing is recorded unless the environment names where spans go:
``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``..._TRACES_ENDPOINT``), or ``OTEL_TRACES_EXPORTER`` as "otlp" or "console".
Sampler, resource attributes, headers, certificates and batches follow the specification's variables as well
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from epd_serve.metrics.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.2
_MAX_WAITING = 16384
#: How long a process that ends waits for a collector.
_LAST_FLUSH_S = 3.0

Kind = Literal["server", "client", "internal"]
Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSpan:
    """``context.span_id`` is the span's own; times are seconds of the process's monotonic clock."""

    name: str
    context: TraceContext
    start_s: float
    end_s: float
    kind: Kind = "internal"
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter:
        return exporter != "none"
    return any(
        environment.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip() for name in ("ENDPOINT", "TRACES_ENDPOINT")
    )


def span_recorder(instance: str, environment: Mapping[str, str] = os.environ) -> SpanRecorder | None:
    """A recorder for one process, called ``instance`` in its resource; None where no spans are asked for, or they
    cannot be had, which the log says."""
    if not wanted(environment):
        return None
    if any(
        importlib.util.find_spec(package) is None
        for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
    ):
        logger.warning(
            "OTEL_* asks for spans, but OpenTelemetry is not installed; run in epd-serve's clone: "
            "pip install '.[otel]'"
        )
        return None
    exporter = _exporter(environment)
    return None if exporter is None else SpanRecorder(instance, exporter)


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    kind = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    if kind != "otlp" or protocol != "http/protobuf":
        logger.warning(
            "no spans are exported: OTEL_TRACES_EXPORTER can be otlp, console or none, got %r; "
            "OTEL_EXPORTER_OTLP_PROTOCOL can be http/protobuf, got %r",
            kind,
            protocol,
        )
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class _GivenIds:
    """OpenTelemetry's IdGenerator: the ids of the span that is being made."""

    trace_id = 0
    span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id

    def is_trace_id_random(self) -> bool:
        return True


class SpanRecorder:
    """Takes finished spans, whose ids are given; a thread makes OpenTelemetry's of them.

    Attributes:
        num_dropped: spans that came while too many were waiting.
    """

    def __init__(self, instance: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        attributes: dict[str, str] = {"service.instance.id": instance}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "epd-serve"
        self._ids = _GivenIds()
        self._provider: TracerProvider = TracerProvider(
            id_generator=self._ids, resource=Resource.create(attributes), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("epd-serve")
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._waiting: deque[FinishedSpan] = deque()
        self.num_dropped = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def samples(self, context: TraceContext, name: str) -> bool:
        """Whether a request that has just come is to be recorded, given what its caller has decided."""
        parent = _parent(context) if context.parent_id else None
        decision = self._provider.sampler.should_sample(parent, int(context.trace_id, 16), name)
        return bool(decision.decision.is_sampled())

    def put(self, span: FinishedSpan) -> None:
        """Take a span without waiting. The span's context must be sampled."""
        if len(self._waiting) >= _MAX_WAITING:
            self.num_dropped += 1
        else:
            self._waiting.append(span)

    def close(self) -> None:
        """Export what is waiting, for a few seconds at most. Idempotent."""
        self._stopping.set()
        self._thread.join(_LAST_FLUSH_S)
        closing = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        closing.start()
        closing.join(_LAST_FLUSH_S)

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._record_all()
        self._record_all()

    def _record_all(self) -> None:
        while self._waiting:
            self._record(self._waiting.popleft())

    def _record(self, span: FinishedSpan) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
        self._ids.trace_id = int(span.context.trace_id, 16)
        self._ids.span_id = int(span.context.span_id, 16)
        made = self._tracer.start_span(
            span.name,
            context=_parent(span.context) if span.context.parent_id else _no_parent(),
            kind=kinds[span.kind],
            attributes=dict(span.attributes),
            start_time=self._ns(span.start_s),
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(self._ns(max(span.start_s, span.end_s)))

    def _ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._offset_ns


def _no_parent() -> Context:
    from opentelemetry.context import Context

    return Context()


def _parent(context: TraceContext) -> Context:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    span = SpanContext(
        int(context.trace_id, 16),
        int(context.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )
    return set_span_in_context(NonRecordingSpan(span), _no_parent())
