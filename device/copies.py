"""Asynchronous copies between the host and a device."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from device import base


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; itself if it is there already or the device is a CPU."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    return pin(tensor, device).to(device, non_blocking=True)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a pinned copy of a host tensor."""
    # torch cannot pin views whose elements share an address, such as those of expand().
    return tensor.contiguous().pin_memory()


def start_readback(tensor: Tensor) -> tuple[Tensor, base.Event]:
    """Return a host copy of a device tensor, and the event that completes it."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return copy, cast(base.Event, event)


class Readback:
    """A copy of a tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._event: base.Event | None = None
        if tensor.device.type != "cpu":
            self._copy, self._event = start_readback(tensor)

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
