"""What workers tell each other through their parent, here in one process with their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from epd_serve.routing.table import InstanceTable
from proxy.admin import create_admin_app
from proxy.admission import AdmissionQueue
from proxy.auth import Authenticator
from proxy.gate import Gate
from proxy.workers import crew as crew_module
from proxy.workers import hub as hub_module
from proxy.workers.channel import Channel
from proxy.workers.crew import Crew
from proxy.workers.hub import Hub
from proxy.workers.ledger import Ledger
from proxy.workers.messages import Drained, Joined, Left, Shared, TakenOver
from proxy.workers.place import WorkerPlace

D0 = Drained("d0", "http://127.0.0.1:1", True)


@pytest.fixture
async def crews() -> AsyncIterator[Callable[..., Any]]:
    """``await crews(2)`` → (hub, two crews that have joined it)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int) -> tuple[Hub, list[Crew]]:
            hub, made = Hub(), []
            descriptor, _ = Ledger.create(count)
            for index in range(count):
                ours, theirs = socket.socketpair()
                channel = hub.connect(index, asyncio.Event())
                await channel.open(ours)
                serving = asyncio.create_task(channel.run())
                stack.callback(serving.cancel)
                place = WorkerPlace(
                    index=index,
                    count=count,
                    config=-1,
                    channel=theirs.detach(),
                    ledger=descriptor,
                    listeners=(),
                )
                crew = Crew(place)
                await crew.join()
                stack.push_async_callback(crew.leave)
                made.append(crew)
            return hub, made

        yield start


async def test_who_shares_a_change_learns_which_workers_have_not_confirmed_it(crews, monkeypatch):
    monkeypatch.setattr(crew_module, "ANSWER_S", 120)
    monkeypatch.setattr(hub_module, "ANSWER_S", 120)
    hub, (first, second) = await crews(2)
    taken = []
    second.on_drained = taken.append
    assert await first.share(D0) == [] and taken == [D0]
    stands_still, theirs = socket.socketpair()
    with stands_still, theirs:
        channel = hub.connect(7, joined := asyncio.Event())
        await channel.open(theirs.dup())
        serving = asyncio.create_task(channel.run())
        told = asyncio.Event()

        async def change(_: bytes) -> bytes:
            told.set()
            await asyncio.Event().wait()
            return b""

        other = Channel({"change": change})
        await other.open(stands_still.dup())
        asked = asyncio.create_task(other.run())
        await other.call("join", timeout_s=120)
        assert joined.is_set()
        monkeypatch.setattr(hub_module, "ANSWER_S", 0.2)
        assert 7 in await first.share(D0)
        monkeypatch.setattr(hub_module, "ANSWER_S", 120)
        told.clear()
        sharing = asyncio.create_task(first.share(D0))
        await told.wait()
        hub.left(7)  # another one will know it
        serving.cancel()
        assert await sharing == []
        asked.cancel()
        await asyncio.gather(serving, asked, return_exceptions=True)


async def test_an_instance_that_joins_while_others_are_asked_is_shown(crews):
    _, (first, second) = await crews(2)
    table = InstanceTable([("d0", D0.url)])

    def joins() -> dict[str, dict[str, int]]:
        table.add("d1", "http://127.0.0.1:2")
        return {"d0": {"D": 1}}

    second.shown["in_flight"] = joins
    second.shown["worker"] = dict
    gate = Gate(Authenticator([]), AdmissionQueue(1, 1), queue_timeout_s=1)
    transport = httpx.ASGITransport(create_admin_app(table, gate, None, first))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = (await client.get("/instances")).json()["instances"]
    assert {one["name"]: one["in_flight"] for one in found} == {"d0": {"D": 1}, "d1": {}}


def test_a_drain_ends_with_its_instance():
    shared = Shared()
    joined = Joined("d0", D0.url, 10.0)
    for change, now_s in (
        (Left("d0"), 0.0),
        (Joined("d1", "http://127.0.0.1:2", 30.0), 20.0),  # by then the lease of d0 is over
        (Drained("d0", D0.url, False), 0.0),
        (TakenOver("{}", {"d0": "http://127.0.0.1:9"}), 20.0),
    ):
        shared.apply(joined, 0.0)
        shared.apply(D0, 0.0)
        shared.apply(TakenOver("{}", {"p0": "http://127.0.0.1:3"}), 0.0)
        assert list(shared.drained) == ["d0"], "it has joined, and is in no file"
        shared.apply(change, now_s)
        assert not shared.drained and D0 not in shared.changes()
    shared.apply(joined, 0.0)
    shared.apply(D0, 0.0)
    shared.expire(11.0)
    assert not shared.drained


def test_a_drain_of_an_instance_of_the_file_ends_when_the_file_has_another_one():
    for then, is_kept in (({"d0": D0.url, "d1": "x"}, True), ({"d0": "http://127.0.0.1:9"}, False), ({}, False)):
        shared = Shared()
        shared.apply(D0, 0.0)
        shared.apply(TakenOver("{}", then), 0.0)
        assert shared.changes() == [D0] * is_kept
