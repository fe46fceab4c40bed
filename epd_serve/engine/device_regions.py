"""A device's memory as a region of a transport: peers on other hosts read it, and the host copies nothing."""

from __future__ import annotations

import logging
import random

import torch
from torch import Tensor

from device.base import Device
from epd_serve.transfer.transport import DeviceBytes, DeviceSlab, TransferError, Transport

logger = logging.getLogger(__name__)

_PROBE_BYTES = 1 << 16


def register(device: Device, transport: Transport, name: str, memory: Tensor) -> DeviceSlab | None:
    """Register a device's memory, [nbytes] uint8 from ``share_memory``; None where that cannot be had."""
    try:
        return transport.register(name, DeviceBytes(memory.data_ptr(), memory.nbytes))
    except TransferError as error:
        logger.warning(
            "%s: %d MiB for %s go through host memory: %s", device.name, memory.nbytes >> 20, name, error
        )
        return None


def are_reached(device: Device, transport: Transport) -> bool:
    """Whether a transport moves what is in the device's memory: it tries. Says so where it might and does not.

    A network card may refuse the memory of a device, or register it and not reach it.
    """
    device.activate()
    memory, _ = device.share_memory(2 * _PROBE_BYTES)
    slab = register(device, transport, "probe", memory)
    if slab is None:
        logger.info("%s: KV and features go to other hosts through host memory", device.name)
        return False
    content, back = random.randbytes(_PROBE_BYTES), bytearray(_PROBE_BYTES)
    memory[:_PROBE_BYTES] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(memory.device)
    try:
        device.synchronize()
        transport.read(slab.region, [(0, slab.buffer[_PROBE_BYTES:])])
        device.settle_arrivals()
        is_right = bytes(memory[_PROBE_BYTES:].cpu().numpy()) == content
        transport.read(slab.region, [(0, memoryview(back))])
    except (TransferError, ValueError) as error:
        logger.warning("%s: its memory is registered and not reached: %s", device.name, error)
        return False
    finally:
        transport.release(slab)
    if not is_right or back != content:
        logger.warning("%s: its memory is registered, and other bytes arrive than lie there", device.name)
    return is_right and back == content
