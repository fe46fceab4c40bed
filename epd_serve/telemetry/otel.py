"""Export of spans by OpenTelemetry's SDK (the extra ``[otel]``), configured by the OTEL_* environment variables.

Spans are recorded if ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``..._TRACES_ENDPOINT``) names a collector that speaks
OTLP over HTTP. The variables for sampler, resource attributes, headers, certificates and batches are
OpenTelemetry's (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from epd_serve.telemetry.span import Span, TraceContext, Value, join_trace, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

#: Limit of the last export when a process ends.
_LAST_FLUSH_S = 3.0
#: Requests whose trace contexts are kept.
_MAX_REQUESTS = 8192


def span_export(instance: str) -> SpanExport | None:
    """Return the exporter of a process, ``instance`` in its resource; None if spans are off.

    Logs a warning if the packages are missing.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if os.environ.get("OTEL_SDK_DISABLED") == "true" or not any(os.environ.get(name) for name in names):
        return None
    try:
        return SpanExport(instance)
    except ImportError:
        logging.getLogger(__name__).warning(
            "OTEL_* enables spans, but OpenTelemetry is not installed; run in epd-serve's clone: "
            "pip install '.[otel]'"
        )
        return None


class SpanExport:
    """Passes finished spans to the SDK, whose thread exports them and drops those it cannot keep up with."""

    def __init__(self, instance: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        service = os.environ.get("OTEL_SERVICE_NAME") or "epd-serve"
        resource = Resource.create({"service.instance.id": instance, "service.name": service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)
        self._scope = InstrumentationScope("epd-serve")
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def samples(self, context: TraceContext, name: str) -> bool:
        """Return whether to record a new request, given its caller's decision."""
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        parent = None
        if context.parent_id:
            parent = set_span_in_context(NonRecordingSpan(_span_context(context, context.parent_id)))
        decision = self._provider.sampler.should_sample(parent, int(context.trace_id, 16), name)
        return bool(decision.decision.is_sampled())

    def put(self, span: Span, context: TraceContext, *, kind: str = "INTERNAL", error: str = "") -> None:
        """Export a finished span, with ``context.span_id`` as its id. Does not block."""
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
            start_time=round(span.start_s * 1e9) + self._offset_ns,
            end_time=round(max(span.start_s, span.end_s) * 1e9) + self._offset_ns,
        )
        self._processor.on_end(made)

    def close(self) -> None:
        """Export pending spans, within a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        closing.start()
        closing.join(_LAST_FLUSH_S)


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
    """Subscribes to an instance's spans and exports those of sampled requests.

    Spans that end before the stage call with their trace context wait for it: P's hand-over can reach D first.
    """

    def __init__(self, export: SpanExport, instance: str) -> None:
        self._export = export
        self._instance = instance
        self._lock = threading.Lock()
        #: By request and item: the caller, None if it is not sampled, or spans that wait for it.
        self._calls: OrderedDict[tuple[str, str], TraceContext | list[Span] | None] = OrderedDict()

    def received(self, request_id: str, traceparent: str, item: str = "") -> None:
        """Record the trace context of a stage call; ``item`` is the mm_hash of an encode."""
        caller, key = parse_traceparent(traceparent), (request_id, item)
        with self._lock:
            waiting = self._calls.pop(key, None)
            self._calls[key] = caller if caller is not None and caller.sampled else None
            self._drop_oldest()
        for span in waiting if isinstance(waiting, list) else ():
            self.put(span)

    def put(self, span: Span) -> None:
        """Export a finished span. Any thread may call it."""
        if not span.request_id:
            return
        item = str(span.attributes.get("item", ""))
        with self._lock:
            caller = self._calls.setdefault((span.request_id, item), [])
            if isinstance(caller, list):
                caller.append(span)
                self._drop_oldest()
        if isinstance(caller, TraceContext):
            about: dict[str, Value] = {"epd.instance": self._instance, **({"epd.item": item} if item else {})}
            named = Span(span.name, span.request_id, span.start_s, span.end_s, about)
            self._export.put(named, join_trace(caller.traceparent))

    def _drop_oldest(self) -> None:
        if len(self._calls) > _MAX_REQUESTS:
            self._calls.popitem(last=False)

    def close(self) -> None:
        self._export.close()
