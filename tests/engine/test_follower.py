"""In which order a follower does what its leader sends."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import NoReturn

import pytest

from epd_serve.engine import follower as module
from epd_serve.engine.commands import Command, CopyBlock, CopyCells, Done, follower_end, leader_end
from epd_serve.engine.follower import Follower, LayerProgress


class Mark:
    def synchronize(self) -> None: ...


class Cache:
    """Takes its time to copy a block."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def copy_block(self, source: int, target: int) -> None:
        time.sleep(0.1)
        self.done.append("block")

    def copy(self, layers: range, blocks: list[int], first_cell: int, *, lands: bool) -> None:
        self.done.append("cells")


def _leave(code: int) -> NoReturn:
    raise SystemExit(code)  # of its thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_of_cells_waits_for_all_that_was_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else KV that has just landed would be overwritten by a fork that an earlier user of the block began."""
    monkeypatch.setattr(module.os, "_exit", _leave)
    ours, theirs = socket.socketpair()
    leader, link = leader_end(ours), follower_end(theirs)
    follower = Follower.__new__(Follower)
    follower._cache = cache = Cache()
    follower._progress = LayerProgress(Mark)
    follower._link = link
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    copies: queue.SimpleQueue[tuple[CopyCells, int]] = queue.SimpleQueue()
    receiving = threading.Thread(target=module._receive, args=(link, commands, copies), daemon=True)
    receiving.start()
    threading.Thread(target=module._copy, args=(follower, copies), daemon=True).start()
    leader.send(CopyBlock(1, 2))
    leader.send(CopyCells(number=1, first_layer=0, end_layer=1, blocks=[1, 2], first_cell=0, lands=True))
    follower.execute(commands.get(timeout=300))
    assert leader.receive() == Done(1)
    assert cache.done == ["block", "cells"]
    leader.close()
    receiving.join(5)
    link.close()
