"""Whether two rankings agree, where some of what is ranked cannot be told apart."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner_measured import Noise, goodput, noise_of, points_of, rank, student_t, tau_b
from benchmarks.planner_runs import WORKLOADS, in_order, mean_profile
from epd_serve.cost.profile import Line, Profile


def test_the_quantiles_of_student() -> None:
    for freedom, known in ((4, 2.776), (8, 2.306), (16, 2.120), (60, 2.000)):
        assert student_t(0.975, freedom) == pytest.approx(known, rel=0.01)


def each(values: dict[str, list[float]]) -> Noise:
    """No two of them are the same."""
    return noise_of(values, {name: name for name in values})


def test_what_all_deployments_share_in_a_round_is_no_noise() -> None:
    found = each({"a": [10.0, 110.0], "b": [20.0, 120.0], "c": [30.0, 130.0]})
    assert (found.squares, found.freedom) == (pytest.approx(0), 2)


def test_the_same_processes_tell_the_noise_of_a_single_round() -> None:
    measured = {"a": [10.0], "b": [20.0], "c": [60.0], "d": [90.0]}
    found = noise_of(measured, {"a": 1, "b": 1, "c": 1, "d": 2})
    assert (found.squares, found.freedom) == (pytest.approx(400 + 100 + 900), 2)
    assert found + found == Noise(squares=2 * found.squares, freedom=4)
    with pytest.raises(ValueError, match="measured twice"):
        rank(measured, measured, each(measured))


def test_deployments_that_are_alike_are_seldom_told_apart() -> None:
    draw = random.Random(0)
    told = pairs = 0
    for _ in range(200):
        measured = {name: [draw.gauss(100, 8) for _ in range(3)] for name in "abcdef"}
        found = rank(measured, measured, each(measured))
        told += found["pairs_told_apart"]
        pairs += found["pairs"]
    assert told / pairs < 0.1


def test_ties_are_neither_right_nor_wrong() -> None:
    measured = {"a": [100.0, 104.0, 102.0], "b": [103.0, 99.0, 101.0], "c": [51.0, 49.0, 50.0]}
    noise = each(measured)
    found = rank(measured, {"a": [90.0] * 3, "b": [91.0] * 3, "c": [40.0] * 3}, noise)
    assert found["tau"] == pytest.approx(1 / 3), "a and b are the other way round"
    assert (found["tau_b"], found["tau_told_apart"], found["pairs_told_apart"]) == (pytest.approx(1), 1, 2)
    assert found["inverted"] == [] and found["choice"] == "b"
    split = rank(measured, {"a": [90.0] * 3, "b": [60.0] * 3, "c": [40.0] * 3}, noise)
    assert split["tau_b"] < 1 and split["tau_told_apart"] == 1, "a difference where there is none"
    wrong = rank(measured, {"a": [40.0] * 3, "b": [60.0] * 3, "c": [90.0] * 3}, noise)
    assert wrong["tau_told_apart"] == -1 and len(wrong["inverted"]) == 2


def test_the_same_processes_are_one_in_the_ranking_of_kinds() -> None:
    measured = {"a": [100.0, 104.0], "b": [103.0, 99.0], "c": [51.0, 49.0]}
    alike = {"a": 1, "b": 1, "c": 2}
    noise = noise_of(measured, alike)
    simulated = {"a": [90.0] * 2, "b": [89.0] * 2, "c": [40.0] * 2}
    found = rank(measured, simulated, noise, alike=alike)
    assert (found["kinds"], found["tau_of_kinds"]) == (2, 1)
    assert (found["pairs_told_apart"], found["pairs_right"]) == (2, 2)
    wrong = rank(measured, {**simulated, "c": [95.0] * 2}, noise, alike=alike)
    assert (wrong["tau_of_kinds"], wrong["pairs_right"]) == (-1, 0)
    told = rank(measured, simulated, noise, means=({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}))
    assert told["tau"] == 1 and told["choice"] == "c", "of the means that are given"


def run_of(number: int, rate: float, share: float, tpot_s: float) -> dict[str, Any]:
    side = {"ttft_s": 0.1, "tpot_s": tpot_s, "throughput": 50.0, "served": 6.0, "sent": 20, "good": 20 * share}
    simulated = {**side, "tpot_s": 0.01}
    return {"file": "a", "workload": "w", "rate": rate, "round": number, "measured": side, "simulated": simulated}


def test_a_point_is_the_mean_of_its_rounds() -> None:
    rows = [run_of(1, 2.0, 1.0, 0.008), run_of(2, 2.0, 0.9, 0.012), run_of(1, 6.0, 0.5, 0.01)]
    two, one = points_of(rows)
    assert (two["rounds"], two["measured"]["tpot_s"], two["measured"]["attainment"]) == (2, 0.01, 0.95)
    assert two["noise"]["tpot_s"] == pytest.approx(abs(0.01 / 0.008 - 0.01 / 0.012) / 2)
    assert "noise" not in one, "one round does not tell its own"
    assert (two["below_saturation"], one["below_saturation"]) == (True, False)
    assert goodput([two, one], "measured") == pytest.approx(2 + 4 * 0.05 / 0.45)


def test_rounds_have_orders_of_their_own() -> None:
    files = [Path(name) for name in "abcdefghi"]
    rounds = [in_order(files, number) for number in range(3)]
    assert rounds[0] == in_order(files, 0)
    orders = {tuple(file for file, one in some if one == workload) for some in rounds for workload in WORKLOADS}
    assert len(orders) == 6 and all(sorted(order) == files for order in orders)


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=3, max_size=12))
def test_a_ranking_agrees_with_itself(signs: list[int]) -> None:
    assert tau_b(signs, signs) == (pytest.approx(1) if any(signs) else None)


def test_the_mean_of_profiles() -> None:
    slow, fast = (
        Profile(
            kind="measured",
            device="cpu",
            model="model",
            step=(Line(base_s=4.0 * part, token_s=part),),
            encode=(),
            num_layers=6,
            interference={"D/E": part / 10},
            samples=[("decode", [1.0, 32.0], part)],
        )
        for part in (3.0, 1.0)
    )
    found = mean_profile([slow, fast])
    assert found.step_s(5, 1) == pytest.approx((slow.step_s(5, 1) + fast.step_s(5, 1)) / 2)
    assert found.interference == {"D/E": pytest.approx(0.2)}
    assert (found.num_layers, found.samples) == (6, [("decode", [1.0, 32.0], 2.0)])
    assert mean_profile([slow]) == slow
