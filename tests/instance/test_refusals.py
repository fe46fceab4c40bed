"""A refused request hears it once, and one that has begun only when all are refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.errors import InstanceFailed, Unavailable
from epd_serve.instance.calls import Refusals


async def test_a_call_is_refused_once_however_often_it_is_asked() -> None:
    refusals, begun = Refusals("d0"), asyncio.Event()
    stage: Any = SimpleNamespace(has_begun=lambda key: begun.is_set())

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            for _ in range(3):
                await asyncio.sleep(0)  # clean-up, while it is refused again
                refusals.refuse(begun=True)
            raise
        return "done"

    async def call(is_moved: bool) -> str:
        async with refusals.call(stage, "r", kind=InstanceFailed if is_moved else Unavailable):
            return await work(60)

    calls = [asyncio.create_task(call(is_moved)) for is_moved in (False, True)]
    await asyncio.sleep(0)
    begun.set()
    refusals.refuse(begun=False)
    assert len(refusals) == 2
    begun.clear()
    refusals.refuse(begun=False)
    with pytest.raises(Unavailable, match="d0 is leaving its role") as refused:
        await calls[0]
    assert refused.value.code == "draining"
    with pytest.raises(InstanceFailed):
        await calls[1]
    assert not len(refusals)
