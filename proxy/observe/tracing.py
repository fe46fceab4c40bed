"""A request's trail as spans: the whole at the gateway, and in it what each instance was asked to do."""

from __future__ import annotations

from epd_serve.telemetry.otel import SpanExport
from epd_serve.telemetry.span import Span, Value
from epd_serve.telemetry.trace_context import TraceContext
from proxy.observe.trail import Trail

#: Number of the span that ends where the first stage begins; stages have their own, from 1.
_RECEIVE = 1 << 20


class RequestExport:
    """The gateway's words to OpenTelemetry."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    def samples(self, context: TraceContext, endpoint: str) -> bool:
        return self._export.samples(context, endpoint)

    def put(self, trail: Trail) -> None:
        """Take a finished request whose context is sampled: its span, "gateway receive" until the first stage,
        then one for each stage."""
        assert trail.end_s is not None
        put, context = self._export.put, trail.context
        whole = Span(f"gateway {trail.endpoint}", trail.request_id, trail.arrived_s, trail.end_s, _about(trail))
        put(whole, context, kind="SERVER", error=trail.error if trail.status >= 500 else "")
        if trail.hops:
            begun_s = trail.hops[0].start_s
            put(Span("gateway receive", "", trail.arrived_s, begun_s), context.child(_RECEIVE))
        for hop in trail.hops:
            about: dict[str, Value] = {"epd.instance": hop.instance} if hop.instance else {}
            if hop.item:
                about["epd.item"] = hop.item
            if hop.source:
                about["epd.feature"] = hop.source
            name = f"{hop.stage} {hop.instance}".rstrip()
            put(
                Span(name, "", hop.start_s, hop.end_s or hop.start_s, about),
                context.child(hop.number),
                kind="CLIENT" if hop.instance else "INTERNAL",
                error="failed" if hop.failed else "",
            )

    def close(self) -> None:
        self._export.close()


def _about(trail: Trail) -> dict[str, Value]:
    """Attributes by OpenTelemetry's conventions for HTTP and generative AI where these have a name."""
    known: dict[str, Value | None] = {
        "http.response.status_code": trail.status,
        "gen_ai.operation.name": "text_completion" if trail.endpoint == "completion" else trail.endpoint,
        "gen_ai.request.model": trail.model or None,
        "gen_ai.usage.input_tokens": trail.prompt_tokens,
        "gen_ai.usage.output_tokens": trail.output_tokens,
        "epd.request_id": trail.request_id,
        "epd.modality": trail.modality,
        "epd.num_images": trail.num_images,
        "epd.retries": trail.retries,
        "epd.continuations": trail.continuations,
        "epd.finish_reason": trail.finish_reason or None,
        "epd.key": trail.key or None,
        "epd.ttft_s": trail.ttft_s,
        "error.type": trail.error or None,
    }
    return {name: value for name, value in known.items() if value is not None}
