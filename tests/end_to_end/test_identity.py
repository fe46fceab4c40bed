"""Greedy float32 tokens equal transformers' ``generate``: every family and topology, batched, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import pytest_asyncio
import tiny_models
from fleet import FLEET, TOPOLOGIES
from identity import Fleet, start_fleet

from epd_serve.demo import weights_dir

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Tried each time, in these topologies; the rest takes long. Other files hold Qwen2.5-VL, sounds and texts against
#: ``generate``.
USUAL, FEW, FEW_LINE = "qwen3_vl", ("EPD", "E-P-D", "ED-P"), "E-P-ED-EPD-D"
#: Of pictures that are tiles or rows, and of sounds.
SPLITS = ("EPD", "EP-D", "E-P-D", "(E-P)-D")
OTHERS = {*tiny_models.FAMILY_KINDS, *tiny_models.AUDIO_KINDS}
SLOW = dict.fromkeys([USUAL, "qwen2_5_vl", "demo", "llava", *tiny_models.STATE_KINDS, *OTHERS])
#: As Qwen3.5: they think, and call tools as XML.
THINKING = [f"{kind}, thinking" for kind in tiny_models.STATE_KINDS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A model's instances of a topology."""
    kind, line = request.param
    if kind == "demo":
        path = weights_dir()
    else:
        name, _, thinks = kind.partition(", ")
        path = tmp_path_factory.mktemp("fleet") / name
        tiny_models.make_tiny_model(name, path, thinks=bool(thinks))
    async with start_fleet(path, line, ignore_eos=kind != "demo") as fleet:
        if kind in OTHERS:
            assert all(len(set(answer)) >= 5 for answer in fleet.expected.values()), "answers that say little"
        yield fleet


#: Fleets, the topologies of each, and marks.
CASES: list[tuple[tuple[str, str], Iterable[str], Any]] = [
    ((USUAL, FEW_LINE), FEW, ()),
    *(((kind, FLEET), SPLITS if kind in OTHERS else TOPOLOGIES, pytest.mark.slow) for kind in SLOW),
    *(((kind, FLEET), ("EPD", "E-P-D", "(E-PD)"), pytest.mark.slow) for kind in THINKING),
]


@pytest.mark.parametrize(
    ("fleet", "topology"),
    [
        pytest.param(fleet, one, id=f"{'all-' if marks else ''}{fleet[0]}-{one}", marks=marks)
        for fleet, topologies, marks in CASES
        for one in topologies
    ],
    indirect=["fleet"],
    scope="module",  # that of the fleet: without it, that of a test
)
async def test_tokens_equal_generate(fleet: Fleet, topology: str) -> None:
    await fleet.check_tokens(TOPOLOGIES[topology])
