"""The CPU device: threads and cores, events and streams that do nothing, eager graphs."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from device.base import PartitionStrength
from device.cpu import CpuDevice


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A CPU device; the process gets its threads and cores back afterwards."""
    threads, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    device = CpuDevice()
    yield device
    device.set_threads(threads, cores)


def test_affinity_binds_running_and_later_threads(device: CpuDevice) -> None:
    core = max(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max_workers=1) as running:
        assert running.submit(os.sched_getaffinity, 0).result() == os.sched_getaffinity(0)
        device.set_threads(1, [core])
        assert os.sched_getaffinity(0) == {core}
        assert running.submit(os.sched_getaffinity, 0).result() == {core}
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert seen == [{core}]


@pytest.mark.parametrize("cores", [[], [100_000], [-1]])
def test_cores_that_the_machine_lacks_are_refused(device: CpuDevice, cores: list[int]) -> None:
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="choose from 0"):
        device.set_threads(before[0] + 1, cores)
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


def test_shares_divide_the_cores(device: CpuDevice) -> None:
    every = sorted(os.sched_getaffinity(0))
    half = max(1, round(len(every) / 2))
    partition = device.apply_share(0.5)
    assert partition.strength is PartitionStrength.COOPERATIVE
    assert partition.mechanisms[0] == f"{half} threads"
    assert torch.get_num_threads() == half
    assert sorted(os.sched_getaffinity(0)) == every[:half]
    device.apply_share(0.5, start=0.5)
    assert sorted(os.sched_getaffinity(0)) == every[-half:]
    device.apply_share(1.0)
    assert sorted(os.sched_getaffinity(0)) == every


@pytest.mark.parametrize(("share", "start"), [(0.0, 0.0), (-0.5, 0.0), (1.5, 0.0), (0.5, 0.6), (0.5, -0.1)])
def test_shares_outside_the_device_are_refused(device: CpuDevice, share: float, start: float) -> None:
    with pytest.raises(ValueError, match="with a sum of at most 1"):
        device.apply_share(share, start)


def use_memory(num_bytes: int) -> None:
    """Write to memory that no allocator keeps afterwards."""
    with mmap.mmap(-1, num_bytes) as memory:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            memory[page] = 1


def test_the_peak_of_memory_is_that_since_it_was_reset(device: CpuDevice) -> None:
    size, found = 96 << 20, []
    while not any(0.9 * size <= more <= 1.5 * size for more in found):
        assert len(found) < 5, found  # the system may take pages of the process back just then
        use_memory(2 * size)  # an earlier, higher peak
        before = device.reset_peak_memory()
        use_memory(size)
        found.append(device.peak_memory() - before)
    assert 0 < device.headroom() <= device.memory()[0]
