"""The CPU as a device: shares are threads and cores; streams never overlap."""

from __future__ import annotations

import os

import psutil
import torch

from device import base, host
from device.base import DeviceUnavailable, Partition, PartitionStrength, check_share
from device.ops.cpu import CpuOps
from device.transport import TRANSPORTS

#: Products, by their shapes, that oneDNN and torch's ideep keep compiled. By default they keep 1024, which takes
#: hundreds of MB if prompts have many lengths (``benchmarks.soak``).
_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}


class CpuEvent:
    """Stream and Event protocols for work that the calling thread does at once."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def wait_event(self, event: base.Event) -> None:
        event.synchronize()

    def record_event(self) -> base.Event:
        return self

    def __enter__(self) -> CpuEvent:
        return self

    def __exit__(self, *error: object) -> None:
        return


class CpuDevice(host.HostPart):
    """Device protocol over the cores that this process had when the device was opened."""

    name = type = "cpu"
    index = 0
    torch_device = torch.device("cpu")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    transport = TRANSPORTS["cpu"]
    has_streams = False
    partition = Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=("threads", "core affinity"))

    def __init__(self) -> None:
        os.environ.update(_KEPT | os.environ)  # read at the first product
        self._cores = sorted(os.sched_getaffinity(0))
        self.cores: int | None = len(self._cores)
        self.description = host.processor_name()
        self._stream = CpuEvent()
        self.ops: base.AttentionOps = CpuOps()

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """Bind this process to its share of the cores, one at least; shares smaller than a core overlap."""
        check_share(share, start)
        count = max(1, round(share * len(self._cores)))
        first = min(round(start * len(self._cores)), len(self._cores) - count)
        cores = self._cores[first : first + count]
        host.set_threads(count, cores)
        return Partition(
            strength=PartitionStrength.COOPERATIVE,
            mechanisms=(f"{count} threads", f"affinity to cores {','.join(map(str, cores))}"),
        )

    def memory(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.total, memory.available

    def headroom(self) -> int:
        return psutil.virtual_memory().available

    reset_peak_memory = staticmethod(host.reset_peak_memory)
    peak_memory = staticmethod(host.peak_memory)

    def set_memory_fraction(self, fraction: float) -> None:
        raise ValueError("the CPU's allocator cannot cap memory: bound the sizes of the caches instead")

    def synchronize(self) -> None:
        return

    activate = check = synchronize

    def stream(self, priority: int = 0, share: float | None = None) -> base.Stream:
        if share is not None:
            raise ValueError("a CPU cannot limit a stream to a share, only threads: remove tower_share")
        return CpuEvent()

    def current_stream(self) -> base.Stream:
        return self._stream

    def record_event(self) -> base.Event:
        return self._stream.record_event()


def missing() -> str | None:
    """Return None: every machine has a CPU."""
    return None


def count() -> int:
    return 1


def open_device(index: int) -> CpuDevice:
    """Open the CPU. Raises DeviceUnavailable for an index above 0: all cores are one device."""
    if index != 0:
        raise DeviceUnavailable(f"cpu:{index}: the only CPU device is cpu; give instances shares of it")
    return CpuDevice()
