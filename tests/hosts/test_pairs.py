"""Two hosts that do not see each other, while the gateway sees both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from chat import chat
from pictures import noise

TEXT = chat("Count to 5", max_tokens=12)


@pytest.mark.parametrize("cut_s", [8, pytest.param(60, marks=pytest.mark.slow)])
async def test_texts_go_to_the_d_that_p_can_reach(fleet: Callable[..., Any], cut_s: float) -> None:
    async with fleet("p0", "d0", "d1") as running:
        for _ in range(4):
            await running.ask(TEXT)
        running.hosts.cut("p0", "d0")
        answers = await _ask_for(cut_s, running, lambda _: TEXT)
        assert {text for _, text, _ in answers} == {(await running.ask(TEXT))[1]}
        _check(answers, cut_s)
        running.hosts.mend("p0", "d0")
        await _until_used(running, "d0", lambda _: TEXT)


@pytest.mark.parametrize("cut_s", [8, pytest.param(60, marks=pytest.mark.slow)])
async def test_pictures_need_no_e_that_cannot_reach_p(fleet: Callable[..., Any], cut_s: float) -> None:
    def picture(number: int) -> dict[str, Any]:
        return chat("What is it?", noise(number, (96, 72)), max_tokens=4)

    async with fleet("e0", "p0", "d0") as running:
        for number in range(3):
            await running.ask(picture(number))
        running.hosts.cut("e0", "p0")
        _check(await _ask_for(cut_s, running, lambda number: picture(100 + number)), cut_s)
        running.hosts.mend("e0", "p0")
        await _until_used(running, "e0", lambda number: picture(1000 + number))


async def _ask_for(seconds: float, running: Any, body: Callable[[int], dict[str, Any]]) -> list[Any]:
    answers, until = [], time.monotonic() + seconds
    while time.monotonic() < until or len(answers) < 5:
        answers.append(await running.ask(body(len(answers))))
        await asyncio.sleep(0.2)
    return answers


def _check(answers: list[Any], cut_s: float) -> None:
    """The longer test is for a machine that has nothing else to do."""
    times = [took_s for _, _, took_s in answers]
    print(len(answers), "requests, seconds of the slowest", [round(one, 2) for one in sorted(times)[-6:]])
    assert {status for status, _, _ in answers} == {200}
    limit_s = 2 if cut_s == 60 else 4
    assert sum(took_s > limit_s for took_s in times) <= 1, "later ones find at once that there is no connection"


async def _until_used(running: Any, name: str, body: Callable[[int], dict[str, Any]]) -> None:
    """The pair is tried again."""
    async with asyncio.timeout(200):
        number, before = 0, await running.num_served(name)
        while await running.num_served(name) == before:
            number += 1
            assert (await running.ask(body(number)))[0] == 200
