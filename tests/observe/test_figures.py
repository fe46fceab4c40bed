"""Figures of the live page, from requests and instances."""

from __future__ import annotations

import pytest
from instance_info import instance_info

from epd_serve.config.sections import SLOConfig
from epd_serve.protocol.instance_state import Load, Usage
from epd_serve.routing.table import InstanceTable
from epd_serve.telemetry.span import join
from proxy.api.dashboard import bottleneck
from proxy.observe.figures import RANGES_S, Figures, Slot, series, window
from proxy.observe.record import RequestRecord


def record(second: float, *, status: int = 200, ttft_s: float | None = 0.1) -> RequestRecord:
    """A request that ended then; of a streamed answer where there is a ``ttft_s``."""
    made = RequestRecord("chat", join("", ""), "r", second - 1)
    made.ttft_s, made.end_s = ttft_s, second
    made.status, made.error = status, "timeout" if status != 200 else ""
    return made


def test_figures_of_each_range() -> None:
    figures = Figures(SLOConfig(ttft_ms=200))
    for second in range(1000, 2000):
        figures.add(record(second, ttft_s=0.1 if second % 4 else 0.3))
    figures.add(record(1999, status=504, ttft_s=None))
    slots, now_s = figures.slots(), 2000.0
    for range_s, width in RANGES_S.items():
        shown = window(slots[width], width, now_s, range_s)
        assert shown["num_requests"] == pytest.approx(min(range_s, 1000) + 1, abs=width)
        assert shown["reasons"] == {"504 timeout": 1} and shown["num_failed"] == 1
        assert shown["attainment"] == pytest.approx(0.75, abs=0.02)
        assert shown["ttft_ms"]["p50"] == pytest.approx(100) and shown["ttft_ms"]["p99"] == pytest.approx(300)
        rates = series(slots[width], width, now_s)["requests"]
        assert len(rates) == 60 and rates[-2] == 1


def test_the_slots_of_a_busy_gateway_stay_small() -> None:
    figures = Figures()
    for number in range(20_000):
        figures.add(record(1000 + number / 1000))
    assert all(len(one.ttft_s) <= 256 for slots in figures.slots().values() for one in slots)


def test_times_of_a_wide_slot_are_those_of_all_its_seconds() -> None:
    """A burst of slow answers at its beginning stays in its percentiles."""
    wide = Slot(0, num_requests=3000, ttft_s=[5.0] * 256)
    for _ in range(25):
        wide.add(Slot(0, num_requests=100, ttft_s=[0.1] * 100))
    assert wide.num_requests == 5500 and len(wide.ttft_s) == 256
    assert 0.35 < wide.ttft_s.count(5.0) / 256 < 0.75


@pytest.mark.parametrize(
    ("busy", "running", "words"),
    [
        ({"E": 0.1, "P": 4.8, "D": 5.0}, 2, "Prefill is the bottleneck: it computes 96 % of the time"),
        ({"E": 4.5, "P": 0.5, "D": 5.0}, 2, "Encode is the bottleneck: it computes 90 % of the time"),
        ({"E": 0.1, "P": 0.5, "D": 5.0}, 60, "Decode is the bottleneck: 94 % of its places"),
        ({"E": 0.1, "P": 1.0, "D": 5.0}, 2, "No stage holds up the others. Used most: prefill, 20 % of the time"),
    ],
)
def test_the_bottleneck_is_named(busy: dict[str, float], running: int, words: str) -> None:
    table = InstanceTable([(role.lower(), f"http://{role}") for role in "EPD"])
    for role in "EPD":
        for at_s, part in ((10.0, 0.0), (15.0, 1.0)):
            usage = Usage(at_s=at_s, busy_s={role: part * busy[role]})
            told = instance_info(
                role.lower(),
                role,
                usage=usage,
                budgets={"max_num_seqs": 64},
                load=Load(num_running=running if role == "D" else 0),
            )
            table.update(role.lower(), told, contains=0)
    assert bottleneck(list(table)).startswith(words)
