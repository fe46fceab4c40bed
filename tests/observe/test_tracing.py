"""Spans of gateway and instances meet in one trace at a collector that speaks OTLP/HTTP."""

import gzip
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import in_process
import pytest
from aiohttp import web
from program import until
from servers import answered

from epd_serve.telemetry.otel import StageExport, span_export
from epd_serve.telemetry.span import Span

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HOPS = ("gateway receive", "encode e0", "prefill p1", "kv_transfer d2", "decode d2")
NAMES = {"gateway chat", *HOPS, "encode_execute", "prefill_execute", "decode_execute"}


class Collector:
    """``spans``: (service.instance.id, span) of everything that was exported."""

    def __init__(self):
        self.spans = []

    async def take(self, request):
        assert request.path == "/v1/traces"
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        message = otlp.ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert about["service.name"] == "epd-serve"
            self.spans += [
                (about["service.instance.id"], span) for scope in resource.scope_spans for span in scope.spans
            ]
        return web.Response()


@asynccontextmanager
async def collecting():
    collector = Collector()
    async with answered(collector.take) as port:
        yield collector, f"http://127.0.0.1:{port}"


async def test_one_request_is_one_trace_over_all_instances(monkeypatch):
    async with collecting() as (collector, url):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # the collector is in the loop of all instances
        model = Path(__file__).parents[2] / "epd_serve" / "demo" / "weights"
        async with in_process.deployment(model, "E", "P", "D") as running:
            content = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What?"}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": True}
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=7"}
            async with running.session.post(
                f"{running.url}/v1/chat/completions", json={**body, "ignore_eos": True}, headers=headers
            ) as response:
                await response.read()
                assert response.headers["traceparent"].startswith(f"00-{TRACE}-")
            quiet = {"traceparent": f"00-{TRACE[::-1]}-{CALLER}-00"}
            await running.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2}, headers=quiet)
            with suppress(TimeoutError):
                # each process exports its own, whenever its turn comes
                await until(lambda: {span.name for _, span in collector.spans} >= NAMES, 60)
            assert {span.name for _, span in collector.spans} >= NAMES
            await running.settle()
    by_name = {span.name: (source, span) for source, span in collector.spans}
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}, "the other caller wants no spans"
    source, root = by_name["gateway chat"]
    assert (source, root.parent_span_id.hex(), root.trace_state) == ("gateway", CALLER, "vendor=7")
    for name in HOPS:
        assert by_name[name][1].parent_span_id == root.span_id
        assert root.start_time_unix_nano <= by_name[name][1].start_time_unix_nano
        assert by_name[name][1].end_time_unix_nano <= root.end_time_unix_nano
    for name, at, below in (
        ("encode_execute", "e0", "encode e0"),
        ("prefill_execute", "p1", "prefill p1"),
        ("decode_execute", "d2", "gateway chat"),
    ):
        assert by_name[name][0] == at and by_name[name][1].parent_span_id == by_name[below][1].span_id
    about = {one.key: one.value for one in root.attributes}
    assert about["gen_ai.usage.output_tokens"].int_value == 4


def test_a_span_that_ends_before_its_call_comes_is_exported():
    export = Mock()
    stages = StageExport(export, "d0")
    stages.put(Span("decode_queue", "r", 1, 2))
    stages.put(Span("decode_queue", "quiet", 1, 2))
    stages.received("r", f"00-{TRACE}-{CALLER}-01")
    stages.received("quiet", f"00-{TRACE}-{CALLER}-00")
    for name in ("r", "quiet"):
        stages.put(Span("decode_execute", name, 2, 3))
    found = [(span.name, span.request_id, context.trace_id) for (span, context), _ in export.put.call_args_list]
    assert found == [("decode_queue", "r", TRACE), ("decode_execute", "r", TRACE)]


@pytest.mark.parametrize(
    "environment", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:1", "OTEL_SDK_DISABLED": "true"}]
)
def test_nothing_is_recorded_without_a_collector(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert span_export("gateway") is None


PICTURE = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
