"""In which order a follower does what its leader sends."""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from typing import Any, NoReturn

import msgspec
import pytest
from emulated import EMULATED

from device.registry import get_device
from epd_serve.engine import follower as module
from epd_serve.engine.commands import (
    Beside,
    Command,
    CopyBlock,
    CopyCells,
    Done,
    WriteKV,
    follower_end,
    leader_end,
)
from epd_serve.engine.follower import Follower, LayerProgress, MappedKV
from epd_serve.engine.kv_memory import KVCache
from epd_serve.protocol.wire import KVLayout
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.shared_memory import MAPPED_SLOT, is_being_written


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
    copies: queue.SimpleQueue[tuple[Beside, int]] = queue.SimpleQueue()
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


def test_a_rank_writes_under_locks_of_its_own_and_not_after_the_lease() -> None:
    """Those of its leader are gone before it is, if the leader dies."""
    device, transport = get_device(EMULATED), EmbeddedTransport(path="shm")
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=2, block_size=2, dtype="float32", model="m")
    slab = memoryview(bytearray(1 << 10))
    source, target = KVCache(layout, 4, device, slab, 1, 2), KVCache(layout, 4, device, slab)
    source.tensor.fill_(1.0)
    device.synchronize()
    offered = transport.allocate("kv", 1 << 10)
    region = msgspec.structs.replace(offered.region, device=device.type, handles=(target.handle,))
    held: list[bool] = []
    remote, write = MappedKV(), source._write

    def watched(*arguments: Any) -> None:
        held.append(is_being_written(offered.region, 3))
        write(*arguments)

    source._write = watched  # type: ignore[method-assign]
    assert remote.begin(region, source) == ""
    assert is_being_written(offered.region, MAPPED_SLOT)
    command = WriteKV(1, region.name, 0, 2, [1], [3], [3], time.monotonic() - 1.0)
    assert "lease" in remote.write(command, range(2))
    assert not held and not target.tensor.cpu().any()
    assert remote.write(msgspec.structs.replace(command, deadline=math.inf), range(2)) == ""
    assert held == [True] and target.tensor[:, :, 3, :, 1].cpu().all() and not target.tensor[..., 0, :].cpu().any()
    remote.end(region.name)
    assert not is_being_written(offered.region, MAPPED_SLOT) and not is_being_written(offered.region, 3)
    gone = msgspec.structs.replace(region, handles=(b'[0, 0, "none", 1]',))
    assert "is not mapped on each rank" in remote.begin(gone, source)
    transport.close()
