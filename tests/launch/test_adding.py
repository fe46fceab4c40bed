"""Processes that come to a running supervisor, and go from it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epd_serve.launch.processes.process import ProcessDied, ProcessState
from epd_serve.launch.processes.supervisor import Backoff, Supervisor


@pytest.fixture
async def running(fakes: Any, tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(
        [fakes.spec("e0"), fakes.spec("gateway", stops="first")],
        tmp_path,
        backoff=lambda: Backoff(first_s=0.05, limit_s=0.05),
    )
    try:
        await supervisor.start()
        await supervisor.wait_ready(300)
        yield supervisor
    finally:
        await supervisor.stop()


async def test_one_more_is_started_again_like_the_others(running: Supervisor, fakes: Any) -> None:
    added = await running.add(fakes.spec("d0"), 300)
    assert [process.spec.name for process in running.processes] == ["e0", "d0", "gateway"]
    assert added.state is ProcessState.READY
    os.kill(added.pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while added.num_restarts == 0 or not added.ready.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await running.stop()
    assert fakes.alive == set()


@pytest.mark.parametrize(
    ("behaviour", "failure", "timeout_s"), [("die", ProcessDied, 60), ("never", TimeoutError, 1)]
)
async def test_one_that_does_not_become_ready_leaves_the_others_as_they_are(
    running: Supervisor, fakes: Any, behaviour: str, failure: type[Exception], timeout_s: float
) -> None:
    failed = asyncio.create_task(running.wait_failure())
    with pytest.raises(failure):
        await running.add(fakes.spec("d0", behaviour), timeout_s)
    assert fakes.alive == {"e0", "gateway"}
    assert [process.spec.name for process in running.processes] == ["e0", "gateway"]
    assert not failed.done()
    assert running.num_deaths == (failure is ProcessDied), "its log is kept"
    await running.add(fakes.spec("d0"), 300)
    failed.cancel()


async def test_one_that_is_taken_out_is_no_failure_and_those_that_stay_are_watched(
    running: Supervisor, fakes: Any
) -> None:
    failed = asyncio.create_task(running.wait_failure())
    await running.remove("e0")
    assert fakes.alive == {"gateway"} and not failed.done()
    added = await running.add(fakes.spec("d0", "once"), 300)
    os.kill(added.pid, signal.SIGKILL)  # it will not start a second time
    await asyncio.sleep(0)
    assert not failed.done()
    async with asyncio.timeout(300):
        while running.num_deaths < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await running.remove("d0")
    assert fakes.alive == {"gateway"} and not failed.done()
    failed.cancel()
