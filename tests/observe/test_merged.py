"""Metrics of several processes as those of one."""

from instance_info import instance_info
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.protocol.instance_state import Load
from epd_serve.routing.table import InstanceTable
from epd_serve.telemetry.metrics import cumulative, exposition, families_of, merge
from epd_serve.types import Stage
from proxy.observe.metrics import GROWING_GAUGES, SUMMED_GAUGES, GatewayMetrics


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def registry(count: int, value: float) -> CollectorRegistry:
    made = CollectorRegistry()
    counter = Counter("hits", "h", ["kind"], registry=made)
    counter.labels("a").inc(count)
    counter.labels(f"only-{count}").inc()
    Histogram("seconds", "s", buckets=(1.0, 2.0), registry=made).observe(value)
    Gauge("running", "r", registry=made).set(count)
    Gauge("ready", "r", ["instance"], registry=made).labels("e0").set(value)
    return made


def test_counters_histograms_and_some_gauges_add_up():
    parts = [families_of(registry(2, 0.5)), families_of(registry(3, 1.5))]
    found = samples(exposition(merge(parts, {"running"})))
    assert found["hits_total", (("kind", "a"),)] == 5
    assert found["hits_total", (("kind", "only-2"),)] == found["hits_total", (("kind", "only-3"),)] == 1
    assert [found["seconds_bucket", (("le", le),)] for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
    assert (found["seconds_sum", ()], found["seconds_count", ()], found["running", ()]) == (2.0, 2, 5)
    assert found["ready", (("instance", "e0"),)] == 1.5, "what all of them see of an instance"


def test_what_has_ended_keeps_its_counts_and_no_state():
    ended = cumulative(families_of(registry(2, 0.5)))
    found = samples(exposition(merge([ended, families_of(registry(3, 1.5))], {"running"})))
    assert (found["hits_total", (("kind", "a"),)], found["running", ()]) == (5, 3)


def test_lines_of_the_access_log_stay_counted_and_sums_of_state_do_not():
    metrics = GatewayMetrics()
    metrics.watch_access_log(lambda: 5, lambda: 2)
    metrics.watch_admission(lambda: 3, lambda: 4)
    now = metrics.families([])
    retired = merge([cumulative(now, GROWING_GAUGES)] * 2, GROWING_GAUGES)
    found = samples(exposition(merge([retired, now], SUMMED_GAUGES)))
    assert found["epd_serve_access_log_lines", ()] == 15
    assert found["epd_serve_access_log_dropped_lines", ()] == 6
    assert found["epd_serve_num_requests_running", ()] == 3


def test_one_part_is_shown_as_it_is():
    metrics = GatewayMetrics()
    metrics.refused.labels("overloaded", "mine").inc()
    metrics.watch_admission(lambda: 3, lambda: 4)
    instances = InstanceTable([("e0", "http://e0")])
    instances.update("e0", instance_info("e0", load=Load(total_blocks=4, free_blocks=3)), contains=0)
    for name in ("first", "second"):
        instances.in_flight(instances["e0"], Stage.ENCODE, request_id=name)
    alone = samples(metrics.render(instances))
    assert samples(exposition(merge([metrics.families(instances)], SUMMED_GAUGES))) == alone
    twice = samples(exposition(merge([metrics.families(instances)] * 2, SUMMED_GAUGES)))
    assert {name for name, value in twice.items() if value != alone[name]} == {
        ("epd_serve_refused_total", (("key", "mine"), ("reason", "overloaded"))),
        ("epd_serve_in_flight_calls", (("instance", "e0"), ("stage", "E"))),
        *(
            (f"epd_serve_{kind}_{state}", ())
            for kind in ("num_requests", "requests")
            for state in ("running", "waiting")
        ),
    }
