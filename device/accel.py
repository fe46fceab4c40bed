"""The part of a Device common to all accelerators, through torch.accelerator: streams, events, memory."""

from __future__ import annotations

from typing import Any, cast

import torch

from device import base, host
from device.base import DeviceLost, Partition, check_share
from device.ops.plain import PlainOps
from device.transport import TRANSPORTS


class AcceleratorDevice(host.HostPart):
    """Device protocol through torch.accelerator; a vendor's subclass adds the rest."""

    has_streams = True
    cores: int | None
    dtypes: tuple[torch.dtype, ...]
    _memory_fraction = 1.0

    def __init__(self, type: str, index: int, partition: Partition) -> None:
        self.type, self.index = type, index
        self.name = f"{type}:{index}"
        self.torch_device = torch.device(type, index)
        self.transport = TRANSPORTS[type]
        self.partition = partition
        self.ops: base.AttentionOps = PlainOps()
        # torch.cuda and torch.npu share the calls for memory and properties; torch.accelerator lacks them.
        self._vendor: Any = torch.get_device_module(type)
        self.description = str(self._vendor.get_device_name(index))

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """Limit this process to a share of the memory.

        Processes take turns at the compute units, so ``start`` is ignored.
        """
        check_share(share, start)
        self.set_memory_fraction(share)
        return Partition(strength=self.partition.strength, mechanisms=(f"memory fraction {share:g}",))

    def memory(self) -> tuple[int, int]:
        free, total = self._vendor.mem_get_info(self.index)
        return total, free

    def headroom(self) -> int:
        total, free = self.memory()
        used = self._vendor.memory_allocated(self.index)
        held = self._vendor.memory_reserved(self.index)
        return int(min(free + held - used, self._memory_fraction * total - used))

    def reset_peak_memory(self) -> int:
        self._vendor.reset_peak_memory_stats(self.index)
        return int(self._vendor.memory_allocated(self.index))

    def peak_memory(self) -> int:
        return int(self._vendor.max_memory_allocated(self.index))

    def set_memory_fraction(self, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"memory fraction {fraction}: must be above 0 and at most 1")
        self._vendor.set_per_process_memory_fraction(fraction, self.index)
        self._memory_fraction = fraction

    def activate(self) -> None:
        torch.accelerator.set_device_index(self.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def check(self) -> None:
        try:
            torch.accelerator.current_stream(self.torch_device).query()
        except RuntimeError as error:
            raise DeviceLost(f"{self.name} is lost: {error}") from error

    # The casts: torch's streams accept only torch's events, which is narrower than the protocols.
    def stream(self, priority: int = 0, share: float | None = None) -> base.Stream:
        if share is not None:
            raise ValueError(f"{self.name} cannot limit a stream to a share: remove tower_share")
        return cast(base.Stream, torch.Stream(self.torch_device, priority=min(priority, 0)))

    def current_stream(self) -> base.Stream:
        return cast(base.Stream, torch.accelerator.current_stream(self.torch_device))

    def record_event(self) -> base.Event:
        return self.current_stream().record_event()
