"""Prompts that wait for a place at D are D's queue, not P's."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import pytest
from instance_info import instance_info

from epd_serve.autoscale.instance_load import instance_loads
from epd_serve.cost.stages import Work
from epd_serve.protocol.instance_state import Load
from epd_serve.protocol.wire import MediaRef
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


FULL = {"num_expected": 5, "num_refused": 5, "num_running": 1}
_WAITING_S = 5 * 50 * 0.021


@pytest.mark.parametrize(
    ("at_p", "at_d", "prefill_s", "decode_s"),
    [
        # D has refused them, be it for blocks, places or the time of a step
        pytest.param({"num_waiting_tokens": 15}, FULL, 0, _WAITING_S, id="D is full"),
        pytest.param(
            {"num_waiting_tokens": 100, "num_waiting": 4, "num_running": 1}, FULL, 0.11, 0, id="P has them"
        ),
        pytest.param(
            {"num_waiting_tokens": 15}, {"num_expected": 5, "num_running": 1}, 0.025, 0, id="D has places"
        ),
    ],
)
def test_prompts_wait_where_they_are_held_up(
    at_p: dict[str, Any], at_d: dict[str, Any], prefill_s: float, decode_s: float
) -> None:
    prefill, decode = instance_loads(table(p0=dict(at_p), d0=dict(at_d)))
    assert prefill.queue_s.get(Stage.PREFILL, 0.0) == pytest.approx(prefill_s)
    assert decode.queue_s.get(Stage.DECODE, 0.0) == pytest.approx(decode_s)


#: Three prompts of 100 tokens each, of which an image of 7840 pixels has 80.
PROMPTS = {"num_waiting_tokens": 300, "num_waiting": 3}


@pytest.mark.parametrize(
    ("num_encodes", "num_pixels", "part"),
    [
        (0, 0, 1.0),
        (1, 7840, 1 - 80 / 300),
        (3, 3 * 7840, 1 - 240 / 300),
        (1, 100 * 7840, 1 - 1 / 3),  # of a family whose images have few tokens whatever their size
        (9, 100 * 7840, 0.0),
    ],
)
def test_unencoded_images_are_not_in_ps_queue(num_encodes: int, num_pixels: int, part: float) -> None:
    """A prefill instance more would only wait for them, too."""
    made = table(
        e0={"num_waiting_encodes": num_encodes, "num_waiting_pixels": num_pixels}, p0=dict(PROMPTS), d0={}
    )
    info = made["p0"].info
    assert info is not None
    made.update("p0", msgspec.structs.replace(info, tokens_per_pixel=80 / 7840), contains=0)
    _, prefill, _ = instance_loads(made)
    assert prefill.queue_s.get(Stage.PREFILL, 0.0) == pytest.approx(part * 0.31)


def test_unmeasured_work_adds_no_pressure() -> None:
    """Estimates of a gateway that has seen no request are of another machine."""
    loads = {"e0": {"num_waiting_pixels": 10**8}, "p0": {"num_waiting_tokens": 10**5}, "d0": {"num_waiting": 9}}

    def waits(rates: dict[str, StageRate]) -> list[float]:
        made = InstanceTable([(name, "") for name in loads])
        for name, load in loads.items():
            said = Load(total_blocks=100, free_blocks=100, num_running=1, rates=rates, **load)
            made.update(name, instance_info(name, load=said, budgets={"max_num_seqs": 1}), contains=0)
        encode, prefill, decode = instance_loads(made)
        return [
            encode.queue_s.get(Stage.ENCODE, 0.0),
            prefill.queue_s.get(Stage.PREFILL, 0.0),
            decode.queue_s.get(Stage.DECODE, 0.0),
            decode.num_decoding,
        ]

    assert waits({}) == [0, 0, 0, 0]
    assert min(waits({"E": StageRate(0.01, 1e-7), **RATES})) > 0


def test_sent_work_counts_once() -> None:
    made = table(e0={}, p0={}, d0={})
    seconds = made["e0"].costs.encode_s(100 * 100)
    for mm_hash in ("a", "b", "a"):
        with made.open_encode(made["e0"], MediaRef(mm_hash=mm_hash, width=100, height=100)):
            pass
    for again in (False, True):
        with closing(made.open_call(made["d0"], Stage.DECODE, work=Work(num_sequences=2), again=again)):
            pass
    encode, _, decode = instance_loads(made)
    assert encode.sent == {Stage.ENCODE: pytest.approx(2 * seconds), Stage.DECODE: 0}
    assert decode.sent == {Stage.ENCODE: 0, Stage.DECODE: 2}
