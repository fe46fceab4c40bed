"""Greedy float32 tokens equal transformers' ``generate``: every family and topology, batched, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import tiny_models
from fleet import FLEET, TOPOLOGIES
from identity import Fleet, start_fleet

from epd_serve.demo import weights_dir

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*tiny_models.KINDS, "demo"])
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
