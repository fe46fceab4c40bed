"""A host that loses its power says nothing any more: no end of a connection, no reset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from chat import chat
from pictures import noise

#: Longest time without a token of a stream whose host is gone.
MAX_GAP_S = 10.0


@pytest.mark.parametrize("joined", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_streams_go_on_where_another_d_is(fleet: Callable[..., Any], long_text: Any, joined: bool) -> None:
    async with fleet("p0", "d0", "d1", joined=joined) as running:
        good = await running.stream(long_text)
        began = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(running.stream(long_text, one)) for one in began]
        await asyncio.gather(*(one.wait() for one in began))
        in_flight = {name: one["in_flight"] for name, one in (await running.instances()).items()}
        assert in_flight["d0"] and in_flight["d1"], in_flight
        running.hosts.power_off("d0")
        answers = await asyncio.gather(*streams)
        print("gaps", [round(answer.gap_s, 2) for answer in answers])
        assert [answer.text for answer in answers] == [good.text] * 4
        assert max(answer.gap_s for answer in answers) <= MAX_GAP_S


async def test_a_picture_does_not_wait_for_an_e_that_is_gone(fleet: Callable[..., Any]) -> None:
    async with fleet("e0", "p0", "d0") as running:
        warm = [chat("What is it?", noise(seed, (96, 72)), max_tokens=4) for seed in range(3)]
        assert [status for status, _, _ in [await running.ask(body) for body in warm]] == [200] * 3
        bodies = [chat("What is it?", noise(seed, (96, 72)), max_tokens=4) for seed in range(10, 13)]
        first = asyncio.create_task(running.ask(bodies[0]))
        running.hosts.power_off("e0")
        second = asyncio.create_task(running.ask(bodies[1]))  # with connections that seem to be there
        answers = [await first, await second, await running.ask(bodies[2])]
        print("pictures", [(status, round(took_s, 2)) for status, _, took_s in answers])
        assert [status for status, _, _ in answers] == [200] * 3
        assert max(took_s for _, _, took_s in answers) <= 6


@pytest.mark.slow
async def test_a_silent_d_loses_its_stream(fleet: Callable[..., Any], long_text: Any) -> None:
    """It is cut off beyond its lease, and comes back."""
    async with fleet("p0", "d0", "d1") as running:
        good = await running.stream(long_text)
        began = asyncio.Event()
        stream = asyncio.create_task(running.stream(long_text, began))
        await began.wait()
        here = await running.instances()
        victim = max(("d0", "d1"), key=lambda name: here[name]["in_flight"])
        cut_at = time.monotonic()
        running.hosts.isolate(victim)
        answer = await stream
        print("gap", round(answer.gap_s, 2), "after", round(time.monotonic() - cut_at, 2))
        assert answer.text == good.text
        assert answer.gap_s <= MAX_GAP_S
        running.hosts.bring_back(victim)
        await running.ready("p0", "d0", "d1")


@pytest.mark.slow
async def test_instances_let_go_of_what_a_gateway_asked_that_is_gone(fleet: Callable[..., Any]) -> None:
    endless = chat("Count to 9.", max_tokens=1900, ignore_eos=True)
    async with fleet("p0", "d0", joined=False) as running:
        began = asyncio.Event()
        stream = asyncio.create_task(running.stream(endless, began))
        await began.wait()
        assert running.held("d0")["blocks"]
        running.hosts.power_off("gw")
        stream.cancel()
        cut_at = time.monotonic()
        while any(running.held("d0").values()):
            assert time.monotonic() - cut_at < 120
            await asyncio.sleep(1)
        print("free after", round(time.monotonic() - cut_at, 1))
