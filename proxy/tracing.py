"""A request's trail as spans: the whole at the gateway, and in it what each instance was asked to do."""

from __future__ import annotations

from collections.abc import Iterator

from epd_serve.metrics.otel import FinishedSpan, SpanRecorder, Value
from epd_serve.metrics.trace_context import TraceContext
from proxy.trail import Trail

#: Number of the span that ends where the first stage begins; stages have their own, from 1.
_RECEIVE = 1 << 20


class RequestTracing:
    """What the gateway tells OpenTelemetry."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder

    def samples(self, context: TraceContext, endpoint: str) -> bool:
        return self._recorder.samples(context, endpoint)

    def put(self, trail: Trail) -> None:
        """A finished request whose context is sampled."""
        for span in spans_of(trail):
            self._recorder.put(span)

    def close(self) -> None:
        self._recorder.close()


def spans_of(trail: Trail) -> Iterator[FinishedSpan]:
    """The request's span, "gateway receive" until its first stage, then one for each stage.

    Attributes follow OpenTelemetry's conventions for HTTP and generative AI where these have a name.
    """
    assert trail.end_s is not None
    attributes: dict[str, Value] = {
        "http.response.status_code": trail.status,
        "gen_ai.operation.name": "text_completion" if trail.endpoint == "completion" else trail.endpoint,
        "epd.request_id": trail.request_id,
        "epd.modality": trail.modality,
        "epd.num_images": trail.num_images,
        "epd.retries": trail.retries,
        "epd.continuations": trail.continuations,
    }
    known: dict[str, Value | None] = {
        "gen_ai.request.model": trail.model or None,
        "gen_ai.usage.input_tokens": trail.prompt_tokens,
        "gen_ai.usage.output_tokens": trail.output_tokens,
        "epd.finish_reason": trail.finish_reason or None,
        "epd.key": trail.key or None,
        "epd.ttft_s": trail.ttft_s,
        "error.type": trail.error or None,
    }
    attributes |= {name: value for name, value in known.items() if value is not None}
    yield FinishedSpan(
        name=f"gateway {trail.endpoint}",
        context=trail.context,
        start_s=trail.arrived_s,
        end_s=trail.end_s,
        kind="server",
        attributes=attributes,
        error=trail.error if trail.status >= 500 else "",
    )
    if trail.hops:
        yield FinishedSpan(
            name="gateway receive",
            context=trail.context.child(_RECEIVE),
            start_s=trail.arrived_s,
            end_s=trail.hops[0].start_s,
        )
    for hop in trail.hops:
        about: dict[str, Value] = {"epd.instance": hop.instance} if hop.instance else {}
        if hop.item:
            about["epd.item"] = hop.item
        if hop.source:
            about["epd.feature"] = hop.source
        yield FinishedSpan(
            name=f"{hop.stage} {hop.instance}".rstrip(),
            context=trail.context.child(hop.number),
            start_s=hop.start_s,
            end_s=hop.end_s or hop.start_s,
            kind="client" if hop.instance else "internal",
            attributes=about,
            error="failed" if hop.failed else "",
        )
