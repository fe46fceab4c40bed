"""The part of its device to which a process keeps."""

from __future__ import annotations

from device.base import Device
from epd_serve.config import InstanceOptions
from epd_serve.protocol.wire import AppliedShare


def rank_share(options: InstanceOptions, rank: int) -> tuple[float, float] | None:
    """(share, start) of a tensor-parallel rank: that of the instance; on a CPU, which they share, a part of it."""
    whole = options.device_share
    if whole is None:
        return None
    if options.devices[0] != "cpu":
        return whole.share, whole.start
    share = whole.share / len(options.devices)
    return share, whole.start + rank * share


def apply_share(
    device: Device, share: tuple[float, float] | None, memory_share: float | None, threads: int | None
) -> AppliedShare | None:
    """Limit this process to a (share, start) and to a part of the memory; what was set, None where no share is.

    Raises ValueError for shares that the device cannot give.
    """
    applied: AppliedShare | None = None
    if share is not None:
        partition = device.apply_share(*share)
        applied = AppliedShare(share[0], partition.strength, list(partition.mechanisms))
        if threads is not None:
            device.set_threads(threads)
    if memory_share is not None:
        device.set_memory_fraction(memory_share)
    return applied
