"""An emulated accelerator that models time and memory and computes nothing. Does not import torch.

Each operation takes the time given at its launch and calls ``then`` when it is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from device import base
from device.base import DeviceUnavailable, Partition, PartitionStrength, check_share
from device.datasheets import emulated_kind, emulated_sheet, has_stream_priorities
from device.emulated.timeline import Operation, Timeline, TimelineStream, entered_streams, sleep_exactly
from device.present import EMULATED_MEMORY

TYPE = "emulated"


class TimedMemoryError(MemoryError):
    """The memory of the emulated device is full."""


class TimedDevice:
    """BareDevice protocol of an emulated device; ``kind``: see :func:`device.datasheets.emulated_sheet`.

    Copies to and from the host share one link and queue there. ``clock``, ``sleep``: those of the timeline.
    """

    type = TYPE
    cores: int | None = None
    has_streams = True
    partition = Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=("memory fraction",))

    def __init__(
        self,
        kind: str,
        index: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = sleep_exactly,
    ) -> None:
        self.spec = emulated_sheet(kind)
        self.index = index
        self.name = f"{TYPE}:{self.spec.name}:{index}"
        self.description = f"emulated {self.spec.name}, nothing is computed"
        directory = os.environ.get(EMULATED_MEMORY)
        self._timeline = Timeline(self.name, directory, clock=clock, sleep=sleep)
        self._link = Timeline(f"{self.name}.link", directory).stream()
        self._fraction, self._used, self._peak = 1.0, 0, 0
        self._default = self._timeline.stream()
        self._streams = [self._default]

    def copy(self, num_bytes: int) -> Operation:
        """Launch a copy to or from the host. Returns at once."""
        return self._link.launch(num_bytes / self.spec.host_bytes_per_s)

    def take(self, num_bytes: int) -> None:
        """Allocate memory, or free it for a negative number. Raises TimedMemoryError if it is full."""
        if num_bytes > self.headroom():
            raise TimedMemoryError(
                f"emulated out of memory: {num_bytes / 2**20:.0f} MiB requested on {self.name}; this process has "
                f"{self.headroom() / 2**20:.0f} of {self.spec.memory_bytes / 2**20:.0f} MiB free"
            )
        self._used += num_bytes
        self._peak = max(self._peak, self._used)

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        check_share(share, start)
        self.set_memory_fraction(share)
        self._timeline.share = share
        return Partition(strength=self.partition.strength, mechanisms=(f"memory fraction {share:g}",))

    def memory(self) -> tuple[int, int]:
        total = int(self.spec.memory_bytes)
        return total, total - self._used

    def headroom(self) -> int:
        return int(self._fraction * self.spec.memory_bytes) - self._used

    def reset_peak_memory(self) -> int:
        self._peak = self._used
        return self._used

    def peak_memory(self) -> int:
        return self._peak

    def set_memory_fraction(self, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"memory fraction {fraction}: must be above 0 and at most 1")
        self._fraction = fraction

    def set_threads(self, threads: int, cores: Sequence[int] | None = None) -> None:
        """Do nothing: no thread computes."""

    def activate(self) -> None:
        """Do nothing: no vendor library is involved."""

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def check(self) -> None:
        self._timeline.check()

    def stream(self, priority: int = 0, share: float | None = None) -> TimelineStream:
        priority = min(priority, 0) if has_stream_priorities(self.spec.name) else 0
        stream = self._timeline.stream(priority, share)
        self._streams.append(stream)
        return stream

    def current_stream(self) -> TimelineStream:
        entered = reversed(entered_streams())
        return next((one for one in entered if one.timeline is self._timeline), self._default)

    def record_event(self) -> base.Event:
        return self.current_stream().record_event()


def open_device(name: str) -> TimedDevice:
    """Open a device such as ``emulated:h200:0``. Raises DeviceUnavailable for a kind without a data sheet."""
    try:
        return TimedDevice(emulated_kind(name), int(name.rpartition(":")[2]))
    except ValueError as error:
        raise DeviceUnavailable(f"{name}: {error}") from error
