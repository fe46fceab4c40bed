"""Prompts that wait for a place at D are D's queue, not P's."""

from __future__ import annotations

from typing import Any

import pytest
from instance_info import instance_info

from epd_serve.elastic.seen import see
from epd_serve.protocol.wire import Load
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage, StageRate

RATES = {"P": StageRate(0.01, 0.001), "D": StageRate(0.02, 0.001)}


def table(**loads: dict[str, Any]) -> InstanceTable:
    made = InstanceTable([(name, "") for name in loads])
    for name, load in loads.items():
        places = load.pop("places", 8)
        said = Load(total_blocks=100, rates=RATES, mean_output_tokens=50.0, **{"free_blocks": 100, **load})
        made.update(name, instance_info(name, load=said, budgets={"max_num_seqs": places}), contains=0)
    return made


@pytest.mark.parametrize("full", [{"places": 1, "num_running": 1}, {"num_running": 1, "free_blocks": 1}])
def test_prompts_wait_for_a_full_decode_instance(full: dict[str, Any]) -> None:
    prefill, decode = see(table(p0={"num_waiting_tokens": 15}, d0={"num_expected": 5, **full}))
    assert prefill.waits(Stage.PREFILL) == 0
    assert decode.waits(Stage.DECODE) == pytest.approx(5 * 50 * 0.021)
    assert decode.num_decoding == 1


def test_prompts_that_p_has_are_its_own_queue() -> None:
    prefill, decode = see(
        table(
            p0={"num_waiting_tokens": 100, "num_waiting": 4, "num_running": 1},
            d0={"num_expected": 5, "num_running": 1, "places": 1},
        )
    )
    assert prefill.waits(Stage.PREFILL) == pytest.approx(0.11)
    assert decode.waits(Stage.DECODE) == 0


def test_a_decode_instance_with_places_holds_nobody_up() -> None:
    prefill, decode = see(table(p0={"num_waiting_tokens": 15}, d0={"num_expected": 5, "num_running": 1}))
    assert prefill.waits(Stage.PREFILL) == pytest.approx(0.025)
    assert decode.waits(Stage.DECODE) == 0


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (6, 1), (8, 3)])
def test_only_what_finds_no_place_waits_for_one(running: int, waiting: int) -> None:
    """The others are in the next step."""
    [decode] = see(table(d0={"num_waiting": 3, "num_running": running}))
    step_s = 0.02 + 0.001 * max(running, 1)
    assert decode.waits(Stage.DECODE) == pytest.approx(waiting * 50 * step_s / max(running, 1))


def test_items_that_are_encoded_hold_up_their_prompts() -> None:
    full = {"num_expected": 5, "num_running": 1, "places": 1}
    _, _, decode = see(
        table(e0={"num_waiting_encodes": 5, "num_waiting_pixels": 100}, p0={"num_waiting_tokens": 15}, d0=full)
    )
    assert decode.waits(Stage.DECODE) == 0
