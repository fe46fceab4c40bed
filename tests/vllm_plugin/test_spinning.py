"""Processes that have nothing to do leave the cores to others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from epd_serve.vllm_plugin.spinning import share_threads

TIMEOUT = timedelta(seconds=120)


def num_threads() -> int:
    """Those of groups, each of which wakes up a hundred times a second."""
    return sum((one / "comm").read_text().strip() == "gloo_tcp_loop" for one in Path("/proc/self/task").iterdir())


def wait_for_threads(number: int) -> None:
    """A thread has its name a moment after its start."""
    deadline = time.monotonic() + 10
    while num_threads() != number and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == number


def summed(group: ProcessGroupGloo) -> float:
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    return tensor.item()


def test_groups_of_one_process_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroupGloo, "__init__", ProcessGroupGloo.__init__)  # is put back
    share_threads()
    before = num_threads()
    alone = [ProcessGroupGloo(HashStore(), 0, 1, timeout=TIMEOUT) for _ in range(3)]
    wait_for_threads(before + 1)
    assert [summed(one) for one in alone] == [1.0] * 3
    assert alone[0].options._timeout == TIMEOUT
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        pair = list(threads.map(lambda rank: ProcessGroupGloo(store, rank, 2, timeout=TIMEOUT), (0, 1)))
        wait_for_threads(before + 3)  # each of those has its own
        assert list(threads.map(summed, pair)) == [2.0, 2.0]
