"""An instance's part of its requests' traces: a span for each stage that they pass."""

from __future__ import annotations

from collections import OrderedDict

from epd_serve.metrics.otel import FinishedSpan, SpanRecorder, Value
from epd_serve.metrics.timeline import StageSpan
from epd_serve.metrics.trace_context import TraceContext, join, parse_traceparent

#: Requests whose traces are known. Those that end without a word make room in their turn.
_MAX_REQUESTS = 8192


class StageTracing:
    """Any thread may call it."""

    def __init__(self, recorder: SpanRecorder, instance: str) -> None:
        self._recorder = recorder
        self._instance = instance
        self._contexts: OrderedDict[tuple[str, str], TraceContext] = OrderedDict()

    def received(self, request_id: str, traceparent: str, item: str = "") -> None:
        """A stage call has come; ``item`` is an encode's mm_hash."""
        caller = parse_traceparent(traceparent)
        if caller is not None and caller.sampled:
            self._contexts[request_id, item] = caller
            if len(self._contexts) > _MAX_REQUESTS:
                self._contexts.popitem(last=False)

    def passed(self, span: StageSpan) -> None:
        """A request has left a stage."""
        caller = self._contexts.get((span.request_id, span.item))
        if caller is None:
            return
        about: dict[str, Value] = {"epd.instance": self._instance}
        if span.item:
            about["epd.item"] = span.item
        self._recorder.put(
            FinishedSpan(
                name=span.stage,
                context=join(caller.traceparent),
                start_s=span.start_s,
                end_s=span.end_s,
                attributes=about,
            )
        )

    def close(self) -> None:
        self._recorder.close()
