"""Copies between the host and a device, for which the host does not wait."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from device import base


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, or one that is there already; itself on a CPU."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    if device.type == "emulated":
        from device.emulated.tensors import pinned

        return pinned(tensor).to(device, non_blocking=True)
    # torch pins no view in which several numbers share an address, as those of expand().
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class Readback:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: base.Event | None = None
        self._copy = tensor
        if tensor.device.type == "emulated":
            from device.emulated.tensors import record_event

            self._copy = tensor.to("cpu", non_blocking=True)
            self._event = record_event(tensor.device)
        elif tensor.device.type != "cpu":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = cast(base.Event, torch.Event(tensor.device))
            self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
