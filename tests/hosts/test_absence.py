"""Leases outlive cuts, and a stage that is gone is waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from chat import chat

LEASE_S = 10.0


async def test_a_cut_of_half_a_lease_ends_none(fleet: Callable[..., Any]) -> None:
    """Three instances, each cut off in another part of the time between two renewals."""
    names = ("p0", "d0", "d1")
    async with fleet(*names) as running:

        async def cut(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            running.hosts.isolate(name)
            await asyncio.sleep(LEASE_S / 2)
            running.hosts.bring_back(name)

        cuts = [asyncio.create_task(cut(name, LEASE_S / 9 * index)) for index, name in enumerate(names)]
        end = time.monotonic() + LEASE_S * (2 / 9 + 1 / 2) + LEASE_S / 2
        while time.monotonic() < end:
            assert set(await running.instances()) == set(names), "a lease has ended"
            await asyncio.sleep(0.1)
        await asyncio.gather(*cuts)
        await running.ready(*names)


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_the_only_one_of_a_stage_is_replaced(fleet: Callable[..., Any], victim: str) -> None:
    """Its host goes, another one comes back; nobody who asks meanwhile is refused."""
    spare = victim[0] + "9"
    body = chat("Count to 5", max_tokens=12)
    async with fleet("p0", "d0", spare) as running:
        running.hosts.isolate(spare)
        while spare in await running.instances():
            await asyncio.sleep(0.2)
        right = await running.ask(body)
        asked: list[asyncio.Task[Any]] = []

        async def ask_for(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                asked.append(asyncio.create_task(running.ask(body)))
                await asyncio.sleep(0.1)

        await ask_for(1)
        os.kill(running.hosts[victim].pid, signal.SIGKILL)
        await ask_for(1)
        running.hosts.bring_back(spare)
        while not (await running.instances()).get(spare, {}).get("ready"):
            await ask_for(0.2)
        await ask_for(1)
        answers = await asyncio.gather(*asked)
        lost = [answer for answer in answers if answer[:2] != right[:2]]
        print(len(answers), "requests,", len(lost), "lost, slowest", max(took_s for _, _, took_s in answers))
        assert not lost, lost[0]
