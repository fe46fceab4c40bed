"""The parent of a gateway's workers, with small programs in their place."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from epd_serve.config import DeploymentConfig
from proxy.workers import parent as parent_module
from proxy.workers.parent import _Parent
from proxy.workers.sockets import Listeners

HANGS = "import time; time.sleep(3600)"
#: Joins, and ends as it is told.
JOINS = """
import asyncio, sys
from proxy.workers.crew import Crew
from proxy.workers.worker_setup import WorkerSetup

async def main():
    crew, told = Crew(WorkerSetup.parse(sys.argv[-1])), asyncio.Event()
    crew.on_stop = told.set
    await crew.join()
    await told.wait()
    await asyncio.sleep(0.2)

asyncio.run(main())
sys.exit(7)
"""


@pytest.fixture
def parent_of(monkeypatch):
    made = []

    def new(program: str, start_s: float) -> _Parent:
        monkeypatch.setattr(parent_module, "_PROGRAM", (sys.executable, "-c", program))
        monkeypatch.setattr(parent_module, "_START_S", start_s)
        config = DeploymentConfig(gateway={"workers": 2, "port": 0}, hang_timeout_s=0.1)
        parent = _Parent(config, Listeners("127.0.0.1", 0, 2), None, (), reloads=False)
        made.append(parent)
        return parent

    yield new
    for one in made:
        one._listeners.close()
        for worker in one._workers.values():
            worker.kill()


async def test_a_worker_that_hangs_before_it_has_joined_is_killed(parent_of, caplog):
    parent = parent_of(HANGS, 0.2)
    worker = await parent._start(1)
    await asyncio.wait_for(parent._live(1, worker), 300)
    assert worker.process.returncode == -signal.SIGKILL
    assert "worker 1 of the gateway did not come to serve within 0.2 s" in caplog.text


async def test_a_gateway_whose_first_worker_hangs_from_the_start_ends(parent_of, caplog):
    assert await asyncio.wait_for(parent_of(HANGS, 0.2).run(), 300) == signal.SIGKILL
    assert caplog.text.count("did not come to serve") == 1


async def test_a_gateway_stopped_in_the_moment_when_its_first_worker_joins_lets_it_end(parent_of):
    parent = parent_of(JOINS, 120.0)
    parent._hang_timeout_s = None
    worker = await parent._start(0)
    await asyncio.wait_for(worker.joined.wait(), 300)
    parent._stop()
    await parent._keep(0, worker)
    assert worker.process.returncode == 7, "of itself, and not by SIGKILL"
