"""Register device memory with a transport: peers on other hosts read it without copies through host memory."""

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
    """Register device memory, [nbytes] uint8 from ``share_memory``. Returns None if the transport cannot."""
    try:
        return transport.register(name, DeviceBytes(memory.data_ptr(), memory.nbytes))
    except TransferError as error:
        logger.warning(
            "%s: %d MiB for %s go through host memory: %s", device.name, memory.nbytes >> 20, name, error
        )
        return None


def are_reached(device: Device, transport: Transport) -> bool:
    """Test whether the transport can move device memory, and log a failure.

    A network card may refuse device memory, or register it and then fail to access it.
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
        logger.warning("%s: device memory was registered, but cannot be accessed: %s", device.name, error)
        return False
    finally:
        transport.release(slab)
    if not is_right or back != content:
        logger.warning("%s: device memory was registered, but the transport delivers wrong bytes", device.name)
    return is_right and back == content
