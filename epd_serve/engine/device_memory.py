"""Device memory that other processes reach: registered with a transport, or mapped on this host."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from device.base import Device
from epd_serve.protocol.wire import Region
from epd_serve.transfer.shared_memory import UNMAP_S, host_id, is_offered, mapping_lock
from epd_serve.transfer.transport import DeviceBytes, DeviceSlab, NotMapped, PeerGone, TransferError, Transport

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


class MappedMemory:
    """Memory of other processes on a device, mapped from the first use until its owner withdraws it.

    A lock shows the owner that its memory is mapped (:func:`~epd_serve.transfer.shared_memory.release_mapped`).
    Safe from any thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()  # also held by copies: none may run while a mapping ends
        self._mapped: dict[str, tuple[Region, Tensor, ExitStack]] = {}
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None

    @contextmanager
    def reading(self, region: Region) -> Iterator[Tensor]:
        """Yield the memory, [nbytes] uint8, for reading.

        Raises NotMapped if it cannot be mapped, and PeerGone at the end if the owner withdrew it: then the data
        is invalid.
        """
        with self._lock:
            yield self._memory(region)
        if not is_offered(region):
            raise PeerGone(f"the owner of region {region.name} is gone")

    def close(self) -> None:
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        with self._lock:
            self._unmap(list(self._mapped))

    def _memory(self, region: Region) -> Tensor:
        if (known := self._mapped.get(region.name)) is not None:
            return known[1]
        if not region.handle or (region.device, region.host_id) != (self._device.type, host_id()):
            raise NotMapped(f"region {region.name} is not on a device of this host")
        with ExitStack() as mapping:
            mapping.enter_context(mapping_lock(region))
            try:
                memory = mapping.enter_context(self._device.map_memory(region.handle))
            except ValueError as error:
                raise NotMapped(f"region {region.name} cannot be mapped: {error}") from error
            self._mapped[region.name] = region, memory, mapping.pop_all()
        if self._watch is None:
            self._watch = threading.Thread(target=self._run, name="mapped-memory", daemon=True)
            self._watch.start()
        return memory

    def _run(self) -> None:
        self._device.activate()
        while not self._closing.wait(UNMAP_S / 2):
            with self._lock:
                self._unmap([name for name, (region, _, _) in self._mapped.items() if not is_offered(region)])

    def _unmap(self, names: list[str]) -> None:
        for name in names:
            _, memory, mapping = self._mapped.pop(name)
            del memory
            try:
                mapping.close()
            except Exception:  # its process has ended, and the device may have failed
                logger.exception("memory of %s could not be unmapped", name)
