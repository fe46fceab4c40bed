"""The parts of the live table: parts of cores, roles over time, figures."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.deployed import Timing
from benchmarks.elastic.emulated import PHASES, ChangingMix, figures, num_wrong
from benchmarks.elastic.live import SHIFT, Watcher, ratios, summary, together_per_s
from benchmarks.elastic.quotas import ROOT, limited
from epd_serve.bench.types import Record


def test_a_process_gets_its_part_of_a_core_and_all_of_it_back() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            seen, part = psutil.Process(process.pid), 0.1
            try:
                with limited({"busy": process.pid}, part):
                    began, before_s = time.monotonic(), sum(seen.cpu_times()[:2])
                    while (spent_s := sum(seen.cpu_times()[:2]) - before_s) < 0.1:
                        time.sleep(0.01)
                    assert spent_s < 2 * part * (time.monotonic() - began)
            except (OSError, ValueError) as error:
                pytest.skip(f"no control groups of CPU time here: {error}")
            assert not list(ROOT.glob("**/epd-serve-*-busy")), "the group is gone"
            assert process.poll() is None
        finally:
            process.kill()


def test_a_changing_mix_counts_answers_that_differ_and_requests_without_one() -> None:
    mix = ChangingMix(3.0, seed=1)
    assert list(dict.fromkeys(phase for _, phase in mix.arrivals)) == list(PHASES)
    assert [item.max_tokens for item in mix.items(1)] == [phase.num_output_tokens for _, phase in mix.arrivals]

    def answered(text: str) -> list[Record]:
        return [
            Record(
                index=index,
                workload="",
                modality="",
                scheduled_s=0.0,
                first_token_s=0.1,
                finish_s=0.2,
                num_output_tokens=phase.num_output_tokens,
                text=text if index == 2 else "same",
            )
            for index, (_, phase) in enumerate(mix.arrivals)
        ]

    assert num_wrong(mix, answered("same"), answered("same")) == 0
    assert num_wrong(mix, answered("same"), answered("other")) == 1
    found = figures(answered("same")[1:], mix, 3.0)
    assert found["lost"] == 1 and found["goodput"] == (len(mix.arrivals) - 1) / 3.0


def test_figures_are_of_answers_and_errors_are_counted() -> None:
    outcomes = [
        Timing(tokens_s=[1.0, 1.5, 2.0]),
        RuntimeError("full"),
        Timing(tokens_s=[3.0, 7.0]),  # eleven tokens in two events
    ]
    found = summary(outcomes, [3, 3, 11])
    assert found["latency_s"]["mean"] == 4.5
    assert found["ttft_s"]["p50"] == 2.0
    assert found["tpot_s"]["mean"] == pytest.approx((0.5 + 0.4) / 2)
    assert (found["errors"], found["first_error"]) == (1, "full")
    assert ratios(found, found)["tpot_s"] == {"mean": 1, "p50": 1, "p99": 1}
    with pytest.raises(RuntimeError, match="none of 1 requests"):
        summary(outcomes[1:2], [3])


def test_a_crowd_s_tokens_count_while_all_are_decoded() -> None:
    crowd = [Timing(tokens_s=[0.5, 1.0, 2.0, 3.0]), Timing(tokens_s=[1.0, 1.5, 2.0])]
    assert together_per_s(crowd) == 3
    with pytest.raises(RuntimeError, match="never decoded together"):
        together_per_s([Timing(tokens_s=[0.5, 1.0]), Timing(tokens_s=[1.0, 2.0])])


def test_roles_over_time() -> None:
    watcher = Watcher({})
    seen = [("e0", "E", 0.0), ("d0", "D", 0.1), ("e0", "E", 1.0), ("e0", "drains", 2.0), ("e0", "D", 3.0)]
    for name, state, now_s in seen:
        watcher.note(name, state, now_s)
    assert sorted(watcher.spans(2.5)) == [("d0", "D", 0.1, 2.5), ("e0", "E", 0.0, 2.0), ("e0", "drains", 2.0, 2.5)]
    assert watcher.layout() == "2D"


def test_the_first_tenth_is_of_before() -> None:
    assert SHIFT.phases(100) == [SHIFT.before] * 10 + [SHIFT.after] * 90
    assert SHIFT.after.num_tokens == 10 * SHIFT.before.num_tokens
