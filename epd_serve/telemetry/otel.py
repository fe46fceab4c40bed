"""Spans for OpenTelemetry, exported in the background by its SDK as the OTEL_* environment says.

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
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from epd_serve.telemetry.span import Span, TraceContext, Value, join, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

logger = logging.getLogger(__name__)

#: How long a process that ends waits for a collector.
_LAST_FLUSH_S = 3.0
#: Requests whose traces are known. Those that end without a word make room in their turn.
_MAX_REQUESTS = 8192

Kind = Literal["SERVER", "CLIENT", "INTERNAL"]


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


def span_export(instance: str, environment: Mapping[str, str] = os.environ) -> SpanExport | None:
    """The exporter of one process, called ``instance`` in its resource; None where no spans are asked for, or they
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
    return None if exporter is None else SpanExport(instance, exporter)


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


class SpanExport:
    """Hands spans that are over to the SDK, whose thread exports them and drops what is too much for it."""

    def __init__(self, instance: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        attributes: dict[str, str] = {"service.instance.id": instance}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "epd-serve"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._scope = InstrumentationScope("epd-serve")
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def samples(self, context: TraceContext, name: str) -> bool:
        """Whether a request that has just come is to be recorded, given what its caller has decided."""
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        parent = None
        if context.parent_id:
            parent = set_span_in_context(NonRecordingSpan(_span_context(context, context.parent_id)))
        decision = self._provider.sampler.should_sample(parent, int(context.trace_id, 16), name)
        return bool(decision.decision.is_sampled())

    def put(self, span: Span, context: TraceContext, *, kind: Kind = "INTERNAL", error: str = "") -> None:
        """Take a span without waiting. ``context.span_id`` is its own; it must be sampled."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        made = ReadableSpan(
            span.name,
            _span_context(context, context.span_id),
            parent=_span_context(context, context.parent_id) if context.parent_id else None,
            resource=self._provider.resource,
            instrumentation_scope=self._scope,
            kind=SpanKind[kind],
            attributes=span.attributes,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=self._ns(span.start_s),
            end_time=self._ns(max(span.start_s, span.end_s)),
        )
        self._processor.on_end(made)

    def close(self) -> None:
        """Export what is waiting, for a few seconds at most. Idempotent."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        closing.start()
        closing.join(_LAST_FLUSH_S)

    def _ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._offset_ns


def _span_context(context: TraceContext, span_id: str) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    return SpanContext(
        int(context.trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )


class StageExport:
    """Subscribes to the spans of an instance and exports those of requests whose callers sample them."""

    def __init__(self, export: SpanExport, instance: str) -> None:
        self._export = export
        self._instance = instance
        self._callers: OrderedDict[tuple[str, str], TraceContext] = OrderedDict()

    def received(self, request_id: str, traceparent: str, item: str = "") -> None:
        """A stage call has come; ``item`` is an encode's mm_hash."""
        caller = parse_traceparent(traceparent)
        if caller is not None and caller.sampled:
            self._callers[request_id, item] = caller
            if len(self._callers) > _MAX_REQUESTS:
                self._callers.popitem(last=False)

    def put(self, span: Span) -> None:
        """A span is over. Any thread may call it."""
        item = str(span.attributes.get("item", ""))
        caller = self._callers.get((span.request_id, item))
        if caller is not None:
            about: dict[str, Value] = {"epd.instance": self._instance}
            if item:
                about["epd.item"] = item
            named = Span(span.name, span.request_id, span.start_s, span.end_s, about)
            self._export.put(named, join(caller.traceparent))

    def close(self) -> None:
        """As :meth:`SpanExport.close`."""
        self._export.close()
