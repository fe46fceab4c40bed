"""Requests that wait for a language model go to idle encoders that have one, and clients see none of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from instance_info import instance_info

from epd_serve.flow.events import Event, Stolen
from epd_serve.flow.stealing import DEFAULT_RULE, StealRule
from epd_serve.routing.table import InstanceTable
from proxy.dispatch.stealing import Stealing

RULE = replace(DEFAULT_RULE, threshold=2, batch=4)


@pytest.fixture
async def tiers(start: Any, kit: Any) -> Any:
    """A thief, and an instance that never gets to the prompts that it is sent."""
    gateway = await start("epd0:EPD", "pd0:PD", stealing={"threshold": 2, "batch": 4})
    gateway["epd0"].info = {"steals": True}
    await gateway.until(lambda: gateway.table.has_thieves)
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    return gateway


def ask(gateway: Any, body: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(gateway.answer(body))


async def metric(gateway: Any, name: str) -> float:
    async with gateway.session.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"epd_serve_{name} "))


@pytest.mark.parametrize("stream", [True, False])
async def test_the_last_ones_of_a_long_queue_are_stolen(tiers: Any, kit: Any, stream: bool) -> None:
    bodies = [
        kit.chat(stream=stream),
        kit.chat(stream=stream),
        kit.chat(kit.data_url(kit.picture()), stream=stream),
    ]
    tasks = []
    for number, body in enumerate(bodies, 1):
        tasks.append(ask(tiers, body))
        if number <= RULE.threshold:  # the next one is stolen before it is there, or after
            await tiers.until(lambda number=number: len(tiers["pd0"].got("/stage/prefill")) == number)
    done = [await task for task in tasks[1:]]
    whole = kit.FIRST + kit.REST + kit.DONE if stream else kit.WHOLE
    assert done == [(200, whole)] * 2
    assert not tasks[0].done(), "half a batch is taken, and the queue is short then"
    stolen = tiers["epd0"].got("/stage/prefill")
    assert all(message.decode_url is None for message in stolen) and len(stolen) == 2
    await tiers.until(lambda: len(tiers["pd0"].cancelled) == len(tiers["pd0"].got("/stage/prefill")) - 1)
    assert [len(message.items) for message in stolen].count(1) == 1
    assert len(tiers["epd0"].got("/stage/encode")) == 2, "once for each; the second time it is there"
    assert await metric(tiers, "requests_stolen_total") == 2
    assert await metric(tiers, "request_retries_total") == 0
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await tiers.settle()


async def test_vision_comes_first(tiers: Any, kit: Any) -> None:
    tiers["epd0"].scripts["/stage/encode"] = lambda _: [kit.FOREVER]
    image = ask(tiers, kit.chat(kit.data_url(kit.picture())))
    await tiers.until(lambda: len(tiers["epd0"].got("/stage/encode")) == 1)
    texts = [ask(tiers, kit.chat()) for _ in range(5)]
    await tiers.until(lambda: len(tiers["pd0"].got("/stage/prefill")) == 6)
    for _ in range(20):
        assert (await tiers.answer(b"{}"))[0] == 400, "the gateway looks at its queue meanwhile"
    assert not tiers["epd0"].got("/stage/prefill")
    image.cancel()
    await tiers.until(lambda: len(tiers["epd0"].got("/stage/prefill")) == 4)
    await tiers.until(lambda: sum(task.done() for task in texts) == 4)
    for task in texts:
        task.cancel()
    await asyncio.gather(image, *texts, return_exceptions=True)
    await tiers.settle()


async def test_a_thief_that_dies_gives_back(tiers: Any, kit: Any) -> None:
    pd0, regular = tiers["pd0"], tiers["pd0"]._regular
    pd0.scripts["/stage/prefill"] = lambda message: (
        [kit.FOREVER] if message.request_id.endswith("-1") else regular(message)
    )
    tiers["epd0"].scripts["/stage/prefill"] = lambda _: [kit.DIE]
    tasks = [ask(tiers, kit.chat()) for _ in range(3)]
    await tiers.until(lambda: sum(task.done() for task in tasks) == 2)
    assert [task.result() for task in tasks if task.done()] == [(200, kit.WHOLE)] * 2
    again = [one for one in pd0.got("/stage/prefill") if one.request_id.endswith("-3")]
    assert len(again) == len(tiers["epd0"].got("/stage/prefill")) == 2, "they go where they were"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await tiers.settle()


async def test_who_leaves_makes_room_for_others(tiers: Any, kit: Any) -> None:
    epd0 = tiers["epd0"]
    epd0.scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    for number in range(1, 4):
        tasks = [ask(tiers, kit.chat()) for _ in range(7)]
        count = number * RULE.batch
        await tiers.until(lambda count=count: len(epd0.got("/stage/prefill")) == count)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await tiers.until(lambda count=count: len(epd0.cancelled) == count)
        await tiers.settle()


class Waiting:
    """A request that waits for a language model until it is stolen."""

    def __init__(self) -> None:
        self.flow: Any = SimpleNamespace(is_queued=True, model="m", max_model_len=1, thief=None)

    def feed(self, event: Event) -> None:
        assert isinstance(event, Stolen)
        self.flow.is_queued, self.flow.thief = False, event.thief


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_gateway_looks_at_its_queue_no_longer_than_a_thief_collects(leaves: bool) -> None:
    """One that has taken all there is goes on collecting, but nobody asks it any more."""
    table, now = InstanceTable([("epd0", ""), ("pd0", "")]), [0.0]
    table.update("epd0", instance_info("epd0", steals=True), contains=0)
    table.update("pd0", instance_info("pd0"), contains=0)
    stealing = Stealing[Waiting](table, StealRule(threshold=2, batch=16, collect_s=0.1), clock=lambda: now[0])
    requests = [Waiting() for _ in range(3)]
    for one in requests:
        stealing.see(one)
    running = asyncio.create_task(stealing.run())
    try:
        async with asyncio.timeout(300):
            while not all(one.flow.thief for one in requests):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert stealing._look.is_set() and not stealing.queued
        if leaves:
            table.remove("epd0")
        now[0] = 0.2
        async with asyncio.timeout(300):
            while stealing._look.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    for one in requests:
        stealing.ended(one)
    assert stealing.num_taken == {"epd0": 3}
