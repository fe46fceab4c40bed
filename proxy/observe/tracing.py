"""The spans of finished requests for OpenTelemetry and for the trace file of the gateway."""

from __future__ import annotations

from epd_serve.telemetry.otel import SpanExport
from epd_serve.telemetry.span import Span, Value
from epd_serve.telemetry.timeline import GATEWAY_RECEIVE, GATEWAY_SERVE
from epd_serve.telemetry.trace_context import TraceContext
from epd_serve.telemetry.trace_file import TraceWriter
from proxy.observe.record import DECODE, PREFILL, TRANSFER, RequestRecord

#: Number of the span that ends where the first stage begins; stages have theirs, from 1.
_RECEIVE = 1 << 20


class RequestExport:
    """The gateway's words to OpenTelemetry."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    def samples(self, context: TraceContext, endpoint: str) -> bool:
        return self._export.samples(context, endpoint)

    def put(self, record: RequestRecord) -> None:
        """Take a finished request: its span, "gateway receive" until the first stage, then one for each stage."""
        if not record.context.sampled:
            return
        assert record.end_s is not None
        put, context = self._export.put, record.context
        whole = Span(
            f"gateway {record.endpoint}", record.request_id, record.arrived_s, record.end_s, _about(record)
        )
        put(whole, context, kind="SERVER", error=record.error if record.status >= 500 else "")
        if record.spans:
            begun_s = record.spans[0].start_s
            put(Span("gateway receive", "", record.arrived_s, begun_s), context.child(_RECEIVE))
        for number, span in enumerate(record.spans, start=1):
            about = span.attributes
            instance = str(about.get("instance", ""))
            put(
                Span(
                    f"{span.name} {instance}".rstrip(),
                    span.request_id,
                    span.start_s,
                    span.end_s,
                    {f"epd.{name}": about[name] for name in ("instance", "item", "feature") if name in about},
                ),
                context.child(number),
                kind="CLIENT" if instance else "INTERNAL",
                error="failed" if "failed" in about else "",
            )

    def close(self) -> None:
        self._export.close()


def _about(record: RequestRecord) -> dict[str, Value]:
    """Attributes by OpenTelemetry's conventions for HTTP and generative AI where these have a name."""
    known: dict[str, Value | None] = {
        "http.response.status_code": record.status,
        "gen_ai.operation.name": "text_completion" if record.endpoint == "completion" else record.endpoint,
        "gen_ai.request.model": record.model or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "epd.request_id": record.request_id,
        "epd.modality": record.modality,
        "epd.num_images": record.num_images,
        "epd.retries": record.retries,
        "epd.continuations": record.continuations,
        "epd.finish_reason": record.finish_reason or None,
        "epd.key": record.key or None,
        "epd.ttft_s": record.ttft_s,
        "error.type": record.error or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def write_attempts(trace: TraceWriter, record: RequestRecord) -> None:
    """Write the times of a served request's attempts that did not fail, until the call went out and since then."""
    if record.status != 200:
        return
    assert record.end_s is not None
    spans = [span for span in record.spans if span.name in (PREFILL, TRANSFER, DECODE)]
    failed = {span.request_id for span in spans if "failed" in span.attributes}
    sent_s = {span.request_id: span.start_s for span in reversed(spans) if span.request_id not in failed}
    for request_id, at_s in sent_s.items():
        trace.put(Span(GATEWAY_RECEIVE, request_id, record.arrived_s, at_s))
        trace.put(Span(GATEWAY_SERVE, request_id, at_s, record.end_s))
