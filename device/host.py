"""Cores, threads and memory of the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from device import base
from device.transport import TRANSPORTS


class HostPart:
    """Host part of a Device whose memory cannot be mapped by other processes and gains nothing from pinning."""

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

    def graph_runner(self) -> base.GraphRunner:
        return base.EagerRunner()


def processor_name() -> str:
    """Return the processor's model name from Linux, or its architecture if Linux has none."""
    return _read_field("/proc/cpuinfo", "model name") or os.uname().machine


def processor_features() -> str:
    """Return the processor's instruction sets as Linux lists them; empty if it does not."""
    return _read_field("/proc/cpuinfo", "flags")


def _read_field(file: str, field: str) -> str:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def set_threads(threads: int, cores: Sequence[int] | None = None) -> None:
    """Let torch compute with ``threads`` threads, and pin the whole process to ``cores`` if given.

    Raises ValueError for fewer than one thread, and for cores that the machine lacks.
    """
    if threads < 1:
        raise ValueError(f"{threads} threads: an instance needs at least 1")
    if cores is not None:
        known = range(os.cpu_count() or 1)
        if not cores or not set(cores) <= set(known):
            raise ValueError(f"cores {list(cores)}: choose from 0 to {known[-1]}")
        # The system call binds a single thread, so bind each running thread.
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended since the listing
                os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(threads)


def reset_peak_memory() -> int:
    """Reset :func:`peak_memory` if the system permits it. Returns the bytes in use now."""
    with contextlib.suppress(OSError):  # the peak then covers the process's whole life: an upper bound
        Path("/proc/self/clear_refs").write_text("5")
    return _read_memory("VmRSS")


def peak_memory() -> int:
    """Return the peak of this process's memory in bytes since :func:`reset_peak_memory`."""
    return _read_memory("VmHWM")


def _read_memory(field: str) -> int:
    return int((_read_field("/proc/self/status", field) or "0").split()[0]) << 10
