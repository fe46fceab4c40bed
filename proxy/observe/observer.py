"""The observer of requests: metrics, access log, traces and the live page get what they show from it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from epd_serve.config import DeploymentConfig
from epd_serve.config.sections import SLOConfig
from epd_serve.errors import ServeError
from epd_serve.telemetry.otel import SpanExport, span_export
from epd_serve.telemetry.span import (
    GATEWAY_RECEIVE,
    GATEWAY_SERVE,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    Span,
    TraceContext,
    Value,
    join,
    random_block,
)
from epd_serve.telemetry.trace_file import TraceWriter
from proxy.observe.access_log import AccessLog
from proxy.observe.figures import Figures
from proxy.observe.metrics import GatewayMetrics
from proxy.observe.record import DECODE, PREFILL, TRANSFER, Pace, RequestRecord

#: A clock read at every token of every answer would cost more than the rest of what is observed.
_PACED_EVERY = 32
#: What is over is taken account of so much later, many requests together: the second one costs half of the first.
_LATER_S = 0.02
#: Of so many in one pass of the event loop: tokens do not wait for the rest.
_AT_ONCE = 16

_TRACEPARENT, _TRACESTATE = TRACEPARENT_HEADER.encode(), TRACESTATE_HEADER.encode()


class Observer:
    """For one event loop; plain objects, for any kind of server. ``begin`` and ``finish`` take a microsecond.

    Args:
        access_log: None: there is none.
        export: None: OpenTelemetry gets no spans; trace contexts are passed on all the same.
        trace: the trace file; None: there is none.
        slo: the limits that requests are held against.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        access_log: AccessLog | None = None,
        export: RequestExport | None = None,
        trace: TraceWriter | None = None,
        slo: SLOConfig | None = None,
    ) -> None:
        self.metrics = metrics
        self._figures = Figures(slo)
        self._finished: list[RequestRecord] = []
        self._access_log = access_log
        self._export = export
        self._trace = trace
        self._num_begun = 0
        self.started_s = time.monotonic()
        self._subscribers: list[Callable[[RequestRecord], None]] = [metrics.finished, self._figures.add]
        metrics.before_render = self.take_account
        if access_log is not None:
            self.subscribe(access_log.put)
            metrics.watch_access_log(lambda: access_log.num_written, lambda: access_log.num_dropped)
        if export is not None:
            self.subscribe(export.put)
        if trace is not None:
            self.subscribe(partial(write_attempts, trace))

    def subscribe(self, subscriber: Callable[[RequestRecord], None]) -> None:
        """Have a function called with each request that is over."""
        self._subscribers.append(subscriber)

    def begin(self, endpoint: str, headers: Mapping[bytes, bytes]) -> RequestRecord:
        """A request has come; ``headers`` by their names in lower case."""
        parent = headers.get(_TRACEPARENT)
        if parent is None:
            context = join()
        else:
            context = join(parent.decode("latin-1"), headers.get(_TRACESTATE, b"").decode("latin-1"))
        if self._export is not None and self._export.samples(context, endpoint) != context.sampled:
            context = replace(context, sampled=not context.sampled)
        record = RequestRecord(
            endpoint, context, random_block().hex(), time.monotonic(), traceparent=context.traceparent
        )
        if not self._num_begun % _PACED_EVERY:  # the first of all is one of them
            record.pace = Pace(self.metrics.inter_token.observe)
        self._num_begun += 1
        return record

    def first_token(self, record: RequestRecord) -> None:
        """A streamed answer begins."""
        record.ttft_s = time.monotonic() - record.arrived_s
        self.metrics.ttft.observe(record.ttft_s, record.endpoint, record.modality)

    def finish(self, record: RequestRecord, status: int, error: ServeError | None = None) -> None:
        """It is over, however it went."""
        record.status, record.error = status, "" if error is None else error.code or error.type
        record.end_s = time.monotonic()
        if not self._finished:
            asyncio.get_running_loop().call_later(_LATER_S, self.take_account, _AT_ONCE)
        self._finished.append(record)

    @property
    def figures(self) -> Figures:
        """The figures of all requests that are over."""
        self.take_account()
        return self._figures

    def take_account(self, most: int = sys.maxsize) -> None:
        """Take account of all requests that are over by now; of more than ``most`` in the loop's next passes."""
        some, self._finished = self._finished[:most], self._finished[most:]
        for record in some:
            record.complete()
            for subscriber in self._subscribers:
                subscriber(record)
        if self._finished:
            asyncio.get_running_loop().call_soon(self.take_account, most)

    def close(self) -> None:
        """Write what is waiting, after :meth:`take_account`.

        Blocks, for some seconds where a collector of spans does not answer.
        """
        for subscriber in (self._access_log, self._export, self._trace):
            if subscriber is not None:
                subscriber.close()


def new_observer(config: DeploymentConfig, metrics: GatewayMetrics) -> Observer:
    """As the configuration, and for spans the environment (:mod:`epd_serve.telemetry.otel`), have it."""
    target, export = config.gateway.access_log, span_export("gateway")
    return Observer(
        metrics,
        access_log=AccessLog(target) if target else None,
        export=None if export is None else RequestExport(export),
        trace=TraceWriter(config.trace, "gateway") if config.trace else None,
        slo=config.slo,
    )


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
        "epd.num_images": record.num_media.get("image", 0),
        "epd.num_videos": record.num_media.get("video", 0),
        "epd.num_sounds": record.num_media.get("audio", 0),
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
