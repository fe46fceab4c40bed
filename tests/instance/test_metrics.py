"""The figures that an instance gives Prometheus add up."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.engine.device_board import Slack
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.protocol.instance_state import Load
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence
from epd_serve.telemetry.span import Span, Timeline
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.transfer.transport import TransferError
from epd_serve.types import SamplingParams


def values(text: bytes) -> dict[str, float]:
    return {
        sample.name.removeprefix("epd_serve_instance_")
        + "".join(f"[{v}]" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def sequence() -> Sequence:
    return Sequence(request_id="r", prompt_ids=[1], sampling=SamplingParams(seed=0), max_tokens=1, positions=None)


async def use(store: EmbeddedFeatureStore) -> None:
    """Have a miss, and two features of which the store has room for one."""
    assert await store.acquire("a", "r") is None
    for key in "ab":
        stored = await store.put(key, memoryview(key.encode() * 600), [600], "uint8", "r")
        assert stored is not None
        event = store.event(key, stored, "r")
        assert store.fetch(event) == key.encode() * 600
        assert await store.acquire(key, "r") is not None
        store.release("r", key)
    with pytest.raises(TransferError):
        store.fetch(msgspec.structs.replace(event, checksum=""))


async def test_all_that_is_told_is_rendered() -> None:
    telemetry, transport = InstanceTelemetry("e0"), EmbeddedTransport(path="shm")
    metrics = telemetry.metrics
    untold = values(metrics.render(Load(), (0, 0), {}))
    metrics.kv_read(50, 2.0)
    half = OutgoingTransfer("t", computed_at=3.0)
    half.num_announcements, half.num_bytes, half.transfer_s, half.exposed_s, half.wait_s = 1, 100, 2.0, 1.0, 1.0
    metrics.kv_delivered(half)
    metrics.kv_delivered(OutgoingTransfer("cached", computed_at=3.0))
    metrics.feature_used(7, transmission_s=4.0, scheduling_s=1.0)
    metrics.feature_used(7, transmission_s=1.0, scheduling_s=5.0)
    metrics.encoded(cached=True)
    metrics.encoded(cached=False)
    metrics.encoded(cached=False, instead=True)
    store = EmbeddedFeatureStore(transport, 1024, metrics.store_did)
    await use(store)
    mixed = ScheduleOutput(decodes=[sequence()], prefills=[(sequence(), 9)])
    decodes = ScheduleOutput(decodes=[sequence()], preempted=[sequence(), sequence()])
    for output, seconds in ((mixed, 0.25), (decodes, 0.5)):
        telemetry.add_step(output, seconds)
    slack = Slack(credit_s=-0.2, limit_s=0.1, alone_s=0.05, beside_s=0.3)
    metrics.render(Load(), (0, 0), {}, paused_s=1.5, prefix_tokens=(20, 10))
    Timeline(lambda: 4.0, metrics.put).record_encode("r", "h", 1.0, (2.0, 4.0))
    metrics.put(Span("text", "", 2.0, 4.0, {"track": "text_0", "waited_s": 1.0}))
    metrics.put(Span("encode", "", 1.0, 3.0, {"track": "tower", "images": 2, "pixels": 50}))
    load = Load(num_running=3, num_waiting=2, free_blocks=4, total_blocks=16)
    state = load, (store.num_owners, store.num_bytes), {"d": (0.01, 1e9)}
    found = values(metrics.render(*state, prefix_tokens=(20, 11), paused_s=4.0, slack=slack))
    expected = {
        "preemptions_total": 2,
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 11,
        "encode_paused_seconds_total": 4.0,
        "token_time_seconds[credit]": -0.2,
        "token_time_seconds[limit]": 0.1,
        "token_time_seconds[alone]": 0.05,
        "token_time_seconds[beside]": 0.3,
        "kv_bytes_total": 50,
        "kv_seconds_total": 2,
        "kv_announcements_total": 1,
        "kv_requests_total": 2,
        "kv_request_bytes_total": 100,
        "kv_request_seconds_total": 2,
        "kv_exposed_seconds_total": 1,
        "kv_overlap_ratio_count": 1,
        "kv_overlap_ratio_sum": 0.5,
        "kv_wait_seconds_sum": 1,
        "kv_handshake_seconds[d]": 0.01,
        "kv_bandwidth_bytes_per_second[d]": 1e9,
        "feature_bytes_total": 14,
        "feature_transmission_seconds_sum": 5,
        "feature_scheduling_seconds_sum": 6,
        "feature_exposed_seconds_total": 3,
        "feature_overlap_ratio_sum": 1.25,
        "encodes_total[true]": 1,
        "encodes_total[false]": 2,
        "feature_arrivals_total[late]": 1,
        "feature_arrivals_total[in_time]": 1,
        "feature_recomputes_total": 1,
        "store_owners": 0,
        "store_held_bytes": 600,
        "store_hits_total[embedded]": 2,
        "store_misses_total[embedded]": 1,
        "store_puts_total[embedded]": 2,
        "store_put_bytes_total[embedded]": 1200,
        "store_put_seconds_count[embedded]": 2,
        "store_evictions_total[embedded]": 1,
        "store_fetches_total[embedded]": 2,
        "store_fetch_bytes_total[embedded]": 1200,
        "store_fetch_failures_total[embedded]": 1,
        "steps_total[mixed]": 1,
        "steps_total[decode]": 1,
        "step_seconds_total[decode]": 0.5,
        "step_tokens_total[decode]": 2,
        "step_tokens_total[prefill]": 9,
        "stage_seconds_sum[encode_queue]": 1,
        "stage_seconds_sum[encode_execute]": 2,
        "stage_seconds_sum[decode_execute]": 0,
        "tower_images_total": 2,
        "tower_pixels_total": 50,
        "tower_seconds_total": 2,
        "preparation_seconds_sum[text]": 3,
        "free_blocks": 4,
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.75,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert metrics.render(*state, prefix_tokens=(5, 0)), "an engine of another role begins anew"
    assert {name.partition("[")[0] for name in found.keys() - untold.keys()} == {
        "kv_handshake_seconds",
        "kv_bandwidth_bytes_per_second",
        "token_time_seconds",
    }
    assert not any(value for name, value in untold.items() if not name.partition("[")[0].endswith("_created"))
    transport.close()
