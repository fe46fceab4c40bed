"""The client table's row of openai's own client, against real instances."""

import asyncio

import pytest

from benchmarks.clients import CELLS, run_row

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_openais_own_client_gets_what_it_asks_for(api, thinker):
    row = await asyncio.to_thread(run_row, "openai", api.url, thinker.url)
    assert row is not None
    assert {cell: row[cell] for cell in CELLS} == dict.fromkeys(CELLS, "ok")
