"""A gateway is not for ever as large as in its worst moment."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path

import pytest

from proxy.http import arrival as resident
from proxy.http.arrival import Growth, give_back, resident_bytes

MIB = 1 << 20


def test_growth_has_ended_once_it_is_steady() -> None:
    sizes = iter([100, 105, 110, 130, 150, 152, 153, 152, 152, 172, 172])
    growth = Growth(lambda: next(sizes) * MIB)
    assert [growth.has_ended() for _ in range(5)] == [False, False, False, False, True]
    growth.start_again()
    assert [growth.has_ended() for _ in range(4)] == [False, False, False, True]


async def test_what_was_freed_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_EVERY_S", 0.01)
    ctypes.CDLL(None).malloc_trim(0)  # of tests before this one
    giving = asyncio.create_task(give_back())
    await asyncio.sleep(0)
    pieces = [bytearray(b"x") * 100_000 for _ in range(1000)]
    large = resident_bytes()
    last = pieces[-1]
    del pieces
    async with asyncio.timeout(300):
        while resident_bytes() > large - 64 * MIB:
            assert not giving.done()
            await asyncio.sleep(0.01)
    assert last
    giving.cancel()


async def test_a_gateway_that_cannot_see_its_size_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_STATM", tmp_path / "statm")
    await give_back()
