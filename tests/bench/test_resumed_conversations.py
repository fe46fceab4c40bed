"""Conversations that are gone on with hold up nobody else's requests."""

from __future__ import annotations

import asyncio

from load_tester import Scripted, item, settings

from epd_serve.bench.connection import Connections, Target
from epd_serve.bench.plan import Chain, Plan
from epd_serve.bench.runner import Runner
from epd_serve.bench.types import Record


def turns(first: int, conversation: str) -> Chain:
    both = tuple(item(first + turn, "steady", conversation=conversation, turn=turn) for turn in range(2))
    return Chain(items=both, at_s=0.0)


def test_all_is_sent_when_it_is_due(scripted: Scripted) -> None:
    plan = Plan(
        chains=[
            turns(0, "a"),
            *(Chain(items=(item(index, "steady"),), at_s=index / 10 + 40) for index in (2, 3)),
        ]
    )
    answered = Record(
        index=0, workload="scripts", modality="text", scheduled_s=0.0, sent_s=0.0, finish_s=41.0, text="x"
    )
    records: list[Record] = []

    async def work() -> Runner:
        connections = Connections(Target(scripted.url), timeout_s=60)
        runner = Runner(
            plan,
            connections,
            settings(scripted.url),
            headers=lambda index: f"x-request-id: resumed-{index}\r\n",
            on_record=records.append,
            done={0: answered},
        )
        try:
            assert await runner.run()
        finally:
            await connections.close()
        return runner

    runner = asyncio.run(work())
    assert runner.plan_offset_s == 40.2  # not 0, where the conversation began
    assert {one.index: one.scheduled_s for one in records} == {1: 41.0, 2: 40.2, 3: 40.3}
    assert [one.index for one in sorted(records, key=lambda one: one.sent_s or 0.0)] == [2, 3, 1]
