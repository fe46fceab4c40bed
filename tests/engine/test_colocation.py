"""A tower beside decodes on emulated devices, by a virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.colocation import MODES, emulate


@pytest.mark.parametrize("kind", ["h100", "a100"])
def test_decodes_before_the_tower_keep_their_time_per_token(kind: str) -> None:
    alone, none, priority, share = (emulate(kind, mode) for mode in ("alone", *MODES))
    assert none["tpot_ms"] > 1.05 * alone["tpot_ms"], "equal streams slow each other"
    assert priority["tpot_ms"] < 1.03 * alone["tpot_ms"], "what is left of the slowdown is the memory's"
    assert share["tpot_ms"] == pytest.approx(alone["tpot_ms"])
    assert none["encodes_s"] > priority["encodes_s"] > share["encodes_s"] > 0.5 * none["encodes_s"]


def test_streams_of_an_npu_have_no_priorities() -> None:
    alone, none, priority, share = (emulate("ascend-910b3", mode) for mode in ("alone", *MODES))
    assert none == priority and none["tpot_ms"] > 1.05 * alone["tpot_ms"]
    assert share["tpot_ms"] == pytest.approx(alone["tpot_ms"])
