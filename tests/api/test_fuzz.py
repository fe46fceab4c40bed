"""Some hundred of the cases of ``epd-serve verify --check api.fuzz``, over every API."""

from __future__ import annotations

import pytest
import pytest_asyncio

from epd_serve.verify.client import Client
from epd_serve.verify.fuzz import Findings, Fuzzer, answered, run_cases, valid_bodies

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(api):
    made = Client(api.url)
    await made.meet()
    yield made
    await made.close()


async def test_the_valid_ones_are_answered(client):
    assert await answered(client) == valid_bodies(client.model)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_is_answered_in_order(api, client, seed):
    found = Findings()
    await run_cases(client, Fuzzer(seed, valid_bodies(client.model)), 100, found, concurrency=4)
    assert not found.problems, f"{len(found.problems)}: {found.problems[0]}"
    await api.settle()
