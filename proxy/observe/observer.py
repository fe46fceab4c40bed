"""Pass finished requests to their subscribers: metrics, access log, traces and dashboard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from epd_serve.config import DeploymentConfig
from epd_serve.errors import ServeError
from epd_serve.telemetry.otel import SpanExport, span_export
from epd_serve.telemetry.span import (
    GATEWAY_RECEIVE,
    GATEWAY_SERVE,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    Span,
    Value,
    join_trace,
)
from epd_serve.telemetry.trace_file import TraceWriter
from proxy.observe.access_log import AccessLog
from proxy.observe.figures import Figures
from proxy.observe.metrics import GatewayMetrics
from proxy.observe.record import DECODE, PREFILL, TRANSFER, Pace, RequestRecord

#: One answer in this many is timed token by token, because reading the clock for every token costs too much.
_PACED_EVERY = 32
#: Number of the span from arrival to the first stage; stages count from 1.
_RECEIVE = 1 << 20
_TRACEPARENT, _TRACESTATE = TRACEPARENT_HEADER.encode(), TRACESTATE_HEADER.encode()


class Observer:
    """Begins and finishes the records of requests."""

    def __init__(self, config: DeploymentConfig) -> None:
        self.metrics = GatewayMetrics()
        self.figures = Figures(config.slo)
        self.started_s = time.monotonic()
        self._num_begun = 0
        self._subscribers: list[Callable[[RequestRecord], None]] = [self.metrics.put, self.figures.put]
        self._closers: list[Callable[[], None]] = []
        if config.gateway.access_log:
            log = AccessLog(config.gateway.access_log)
            self.subscribe(log.put, log.close)
        if config.trace:
            trace = TraceWriter(config.trace, "gateway")
            self.subscribe(lambda record: _write_attempts(trace, record), trace.close)
        self._export = export = span_export("gateway")
        if export is not None:
            self.subscribe(lambda record: _export_spans(export, record), export.close)

    def subscribe(
        self, subscriber: Callable[[RequestRecord], None], close: Callable[[], None] = lambda: None
    ) -> None:
        """Call ``subscriber`` for each finished request, and ``close`` at the end."""
        self._subscribers.append(subscriber)
        self._closers.append(close)

    def begin(self, endpoint: str, headers: Mapping[bytes, bytes]) -> RequestRecord:
        """Return the record of a new request; ``headers`` have lower-case names."""
        parent, state = headers.get(_TRACEPARENT, b""), headers.get(_TRACESTATE, b"")
        context = join_trace(parent.decode("latin-1"), state.decode("latin-1"))
        if self._export is not None:
            context = replace(context, sampled=self._export.samples(context, endpoint))
        record = RequestRecord(
            endpoint, context, os.urandom(16).hex(), time.monotonic(), traceparent=context.traceparent
        )
        if not self._num_begun % _PACED_EVERY:
            record.pace = Pace(self.metrics.inter_token.observe)
        self._num_begun += 1
        return record

    def finish(self, record: RequestRecord, status: int, error: ServeError | None = None) -> None:
        """Complete a record and pass it to all subscribers."""
        record.status, record.error = status, "" if error is None else error.code or error.type
        record.end_s = time.monotonic()
        record.complete()
        for subscriber in self._subscribers:
            subscriber(record)

    def close(self) -> None:
        """Flush all subscribers. May block for seconds if a span collector does not answer."""
        for close in self._closers:
            close()


def _write_attempts(trace: TraceWriter, record: RequestRecord) -> None:
    """Write the spans before and after the call of each successful attempt of a served request."""
    if record.status != 200:
        return
    assert record.end_s is not None
    spans = [span for span in record.spans if span.name in (PREFILL, TRANSFER, DECODE)]
    failed = {span.request_id for span in spans if "failed" in span.attributes}
    sent_s = {span.request_id: span.start_s for span in reversed(spans) if span.request_id not in failed}
    for request_id, at_s in sent_s.items():
        trace.put(Span(GATEWAY_RECEIVE, request_id, record.arrived_s, at_s))
        trace.put(Span(GATEWAY_SERVE, request_id, at_s, record.end_s))


def _export_spans(export: SpanExport, record: RequestRecord) -> None:
    """Export a request's span, with child spans until the first stage and for each stage."""
    context = record.context
    if not context.sampled:
        return
    assert record.end_s is not None
    about = _attributes(record)
    whole = Span(f"gateway {record.endpoint}", record.request_id, record.arrived_s, record.end_s, about)
    export.put(whole, context, kind="SERVER", error=record.error if record.status >= 500 else "")
    if record.spans:
        received = Span("gateway receive", "", record.arrived_s, record.spans[0].start_s)
        export.put(received, context.child(_RECEIVE))
    for number, span in enumerate(record.spans, start=1):
        instance = str(span.attributes.get("instance", ""))
        about = {f"epd.{name}": value for name, value in span.attributes.items() if name != "failed"}
        stage = Span(f"{span.name} {instance}".rstrip(), span.request_id, span.start_s, span.end_s, about)
        kind, error = "CLIENT" if instance else "INTERNAL", "failed" if "failed" in span.attributes else ""
        export.put(stage, context.child(number), kind=kind, error=error)


def _attributes(record: RequestRecord) -> dict[str, Value]:
    """Return attributes, named by OpenTelemetry's HTTP and generative AI conventions where possible."""
    known: dict[str, Value | None] = {
        "http.response.status_code": record.status,
        "gen_ai.operation.name": "text_completion" if record.endpoint == "completion" else record.endpoint,
        "gen_ai.request.model": record.model or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "epd.request_id": record.request_id,
        "epd.modality": record.modality,
        "epd.retries": record.retries,
        "epd.continuations": record.continuations,
        "epd.finish_reason": record.finish_reason or None,
        "epd.key": record.key or None,
        "epd.ttft_s": record.ttft_s,
        "error.type": record.error or None,
    }
    return {name: value for name, value in known.items() if value is not None}
