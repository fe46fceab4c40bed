"""In which order a follower does what its leader sends."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import NoReturn

import pytest

from epd_serve.engine import follower as module
from epd_serve.engine.commands import Command, Done, Land, Stage, follower_end, leader_end
from epd_serve.engine.follower import Follower, LayerProgress


class Mark:
    def synchronize(self) -> None: ...


class Cache:
    """Takes its time to land."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def land(self, blocks: list[int]) -> None:
        time.sleep(0.1)
        self.done.append("land")

    def stage(self, layers: range, blocks: list[int]) -> None:
        self.done.append("stage")


def _leave(code: int) -> NoReturn:
    raise SystemExit(code)  # of its thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_staging_waits_for_all_that_was_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else KV that has just landed would be overwritten in the slab by what the blocks held before."""
    monkeypatch.setattr(module.os, "_exit", _leave)
    ours, theirs = socket.socketpair()
    leader, link = leader_end(ours), follower_end(theirs)
    follower = Follower.__new__(Follower)
    follower._cache = cache = Cache()
    follower._progress = LayerProgress(Mark)
    follower._link = link
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    stagings: queue.SimpleQueue[tuple[Stage, int]] = queue.SimpleQueue()
    receiving = threading.Thread(target=module._receive, args=(link, commands, stagings), daemon=True)
    receiving.start()
    threading.Thread(target=module._stage, args=(follower, stagings), daemon=True).start()
    leader.send(Land([1, 2]))
    leader.send(Stage(number=1, first_layer=0, end_layer=1, blocks=[1, 2]))
    follower.execute(commands.get(timeout=300))
    assert leader.receive() == Done(1)
    assert cache.done == ["land", "stage"]
    leader.close()
    receiving.join(5)
    link.close()
