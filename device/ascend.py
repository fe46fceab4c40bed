"""Ascend NPUs through torch_npu: found, opened and shared. Attention is the plain-torch one, graphs are eager.

Nothing in this file has run on an NPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

from device.accel import AcceleratorDevice
from device.base import DeviceUnavailable, Partition, PartitionStrength

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
_PARTITION = Partition(
    strength=PartitionStrength.COOPERATIVE, mechanisms=("memory fraction", "device limit", "stream limit")
)


class AscendDevice(AcceleratorDevice):
    """One NPU."""

    def __init__(self, index: int) -> None:
        super().__init__("npu", index, VISIBLE_DEVICES, _PARTITION)


def missing() -> str | None:
    """What keeps NPUs from being used here; None where at least one is usable."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install 'epd-serve[ascend]'"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error}): source CANN's set_env.sh first"
    if count() == 0:
        return f"no NPU is visible ({VISIBLE_DEVICES}={os.environ.get(VISIBLE_DEVICES, '')!r}); see npu-smi info"
    return None


def count() -> int:
    """NPUs that this process can see; torch_npu is loaded by then."""
    return int(torch.get_device_module("npu").device_count())


def open_device(index: int) -> AscendDevice:
    """Raises DeviceUnavailable with what is missing."""
    if (reason := missing()) is not None:
        raise DeviceUnavailable(f"npu:{index}: {reason}")
    if index >= count():
        raise DeviceUnavailable(f"npu:{index}: {count()} visible, npu:0 to npu:{count() - 1} ({VISIBLE_DEVICES})")
    return AscendDevice(index)
