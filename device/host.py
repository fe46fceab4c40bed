"""The host's cores and threads, which every device's instance uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from device.transport import TRANSPORTS


class HostPart:
    """The host's part of a Device whose memory no other process maps and pinning makes no faster."""

    type: str
    index: int

    def pin_in_place(self, memory: Tensor) -> Callable[[], None]:
        return lambda: None

    def share_memory(self, nbytes: int) -> tuple[Tensor, bytes]:
        alignment = TRANSPORTS[self.type].alignment_bytes
        size = nbytes if alignment == 1 else nbytes + 2 * alignment
        memory = torch.zeros(size, dtype=torch.uint8, device=torch.device(self.type, self.index))
        return memory[-memory.data_ptr() % alignment :][:nbytes], b""

    def map_memory(self, handle: bytes) -> AbstractContextManager[Tensor]:
        raise ValueError(f"memory of {self.type} devices is not shared between processes")

    def settle_arrivals(self) -> None:
        return

    def set_threads(self, threads: int, cores: Sequence[int] | None = None) -> None:
        set_threads(threads, cores)


def usable_cores() -> list[int]:
    """The cores that this process may run on, ascending."""
    return sorted(os.sched_getaffinity(0))


def processor_name() -> str:
    """The processor's name in the vendor's words, as Linux gives it; its architecture where it gives none."""
    return _processor("model name") or os.uname().machine


def processor_features() -> str:
    """The names of the processor's instruction sets, as Linux lists them; empty where it does not."""
    return _processor("flags")


def _processor(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""


def set_threads(threads: int, cores: Sequence[int] | None = None) -> None:
    """Let torch compute with ``threads`` threads, all of the process on ``cores`` only where given.

    Raises ValueError for fewer than one thread, and for cores that the machine lacks.
    """
    if threads < 1:
        raise ValueError(f"{threads} threads; an instance needs at least 1")
    if cores is not None:
        _pin(cores)
    torch.set_num_threads(threads)


def _pin(cores: Sequence[int]) -> None:
    known = range(os.cpu_count() or 1)
    foreign = [core for core in cores if core not in known]
    if foreign or not cores:
        raise ValueError(f"cores {list(cores)}: choose from 0 to {known[-1]}")
    # The system call binds one thread; those that already run do not follow the one that asks.
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended since the listing
            os.sched_setaffinity(int(task.name), cores)


def reset_peak_memory() -> int:
    """Let :func:`peak_memory` begin anew, where the system lets it. Returns the bytes in use now."""
    with contextlib.suppress(OSError):  # then the peak is that of the process's life, an estimate from above
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def peak_memory() -> int:
    """The most bytes of memory that this process used at once since :func:`reset_peak_memory`."""
    return _memory("VmHWM")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0
