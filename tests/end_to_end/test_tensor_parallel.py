"""Instances over several devices: the same tokens as over one, in every width, also between widths.

The tiny models have four query and two KV heads: four ranks share each KV head by two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import tiny_models
from identity import Fleet, start_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLEET = "E-P@tp2-D@tp4-PD@tp2-P-D"
#: Where the KV of one width becomes that of another: wider, narrower, split to whole and back.
TOPOLOGIES = {
    "E-PD@tp2": ("e0", "pd0"),
    "E-P@tp2-D@tp4": ("e0", "p0", "d0"),
    "E-P-D@tp4": ("e0", "p1", "d0"),
    "E-P@tp2-D": ("e0", "p0", "d1"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=tiny_models.KINDS)
async def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    path = tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp("wide") / request.param)
    async with start_fleet(path, FLEET) as fleet:
        yield fleet


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tokens_equal_generate(fleet: Fleet, topology: str) -> None:
    await fleet.check_tokens(TOPOLOGIES[topology])
