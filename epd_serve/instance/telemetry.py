"""Measurements of an instance: spans and their subscribers, metrics, rates."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from epd_serve.config.sections import FeatureStoreKind
from epd_serve.instance.metrics import InstanceMetrics
from epd_serve.instance.rates import StageRates
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.telemetry.otel import StageExport, span_export
from epd_serve.telemetry.span import Span, SpanStream, Timeline, Value
from epd_serve.telemetry.trace_file import TraceWriter


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
