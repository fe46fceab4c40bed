"""Greedy float32 tokens equal transformers' ``generate``: every family and topology, batched, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import tiny_models
from fleet import FLEET, TOPOLOGIES
from identity import Fleet, start_fleet
from tiny_audio import TINY_AUDIO
from tiny_families import TINY

from epd_serve.demo import weights_dir

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Of pictures that are tiles or rows, and of sounds.
_SPLITS = ("EPD", "EP-D", "E-P-D", "(E-P)-D")
#: The others' are tried without processes each time.
_EACH_TIME = ("mistral3", "gemma3")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        *(*tiny_models.KINDS, "qwen2_audio", "demo"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in tiny_models.STATE_KINDS),
    ],
)
async def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    kind = request.param
    if kind == "demo":
        path = weights_dir()
    else:
        path = tiny_models.make_tiny_model(kind, tmp_path_factory.mktemp("fleet") / kind)
    async with start_fleet(path, FLEET, ignore_eos=kind != "demo") as fleet:
        yield fleet


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tokens_equal_generate(fleet: Fleet, topology: str) -> None:
    await fleet.check_tokens(TOPOLOGIES[topology])


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(kind, marks=[] if kind in _EACH_TIME else [pytest.mark.slow])
        for kind in (*TINY, *TINY_AUDIO)
        if kind != "qwen2_audio"
    ],
)
async def other_fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    path = tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp("fleet") / request.param)
    async with start_fleet(path, "2E-P-D-EP-EPD") as fleet:
        assert all(len(set(answer)) >= 5 for answer in fleet.expected.values()), "answers that say little"
        yield fleet


@pytest.mark.parametrize("topology", _SPLITS)
async def test_tokens_of_other_families_equal_generate(other_fleet: Fleet, topology: str) -> None:
    await other_fleet.check_tokens(TOPOLOGIES[topology])
