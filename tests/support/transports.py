"""Every implementation of a transport by name, for the tests that all of them must pass."""

from __future__ import annotations

import importlib.util
from ctypes.util import find_library
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.mooncake.engine import MooncakeOptions
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.transport import DeviceBytes, Transport

#: Mooncake's is fixed by the first engine of a process, so all tests have this one.
TIMEOUT_S = 2.0
#: Smaller than what tests move: bytes from memory that is not registered pass in several parts.
STAGING_BYTES = 512

#: Its wheel links to Debian's libibverbs1, librdmacm1, libnuma1 and libcurl4.
HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None and all(
    map(find_library, ("ibverbs", "rdmacm", "numa", "curl"))
)
needs_mooncake = pytest.mark.skipif(not HAS_MOONCAKE, reason="mooncake is not installed, or a library it links to")


def kinds(*names: str) -> list[object]:
    """Test parameters; mooncake's is skipped where it is not installed."""
    return [pytest.param(name, marks=needs_mooncake) if "mooncake" in name else name for name in names]


def mooncake_options(staging_bytes: int = STAGING_BYTES) -> MooncakeOptions:
    return MooncakeOptions(host="127.0.0.1", protocol="tcp", staging_bytes=staging_bytes, timeout_s=TIMEOUT_S)


#: As of an instance on a chip of tests.
DEVICE_OPTIONS = replace(mooncake_options(), device="chip")


class DeviceMemory:
    """Memory of a chip that a transport has registered."""

    def __init__(self, transport: MooncakeTransport, name: str, nbytes: int) -> None:
        # Imported here because most tests of transports need no torch.
        from chips import CHIP

        from device.registry import get_device

        self._memory, _ = get_device(CHIP).share_memory(nbytes)
        slab = transport.register(name, DeviceBytes(self._memory.data_ptr(), nbytes))
        assert slab is not None
        self.region = slab.region

    def fill(self, offset: int, data: bytes) -> None:
        import torch

        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._memory[offset : offset + len(data)] = content.to(self._memory.device)


class DeviceTransport(MooncakeTransport):
    """One whose slabs are a device's memory."""

    def __init__(self) -> None:
        super().__init__(DEVICE_OPTIONS)

    def allocate(self, name: str, nbytes: int) -> Any:
        return DeviceMemory(self, name, nbytes)


def fill(slab: Any, offset: int, data: bytes) -> None:
    """Write into a slab as its owner does."""
    if isinstance(slab, DeviceMemory):
        slab.fill(offset, data)
    else:
        slab.buffer[offset : offset + len(data)] = data


def make_transport(kind: str) -> Transport:
    if kind == "mooncake":
        return MooncakeTransport(mooncake_options())
    if kind == "mooncake device":
        return DeviceTransport()
    assert kind in ("shm", "tcp", "auto")
    return EmbeddedTransport(path=kind, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
