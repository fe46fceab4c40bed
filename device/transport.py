"""The ways in which the memory of each type of device is sent elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportCapability:
    """The ways in which a device's memory can be sent elsewhere."""

    mooncake_protocols: tuple[str, ...]
    """Protocols of Mooncake's Transfer Engine that can reach what an instance offers; the portable one first.

    Its documentation (supported-protocols.md) says what each needs: rdma a network card, ascend an NPU. nvlink is
    not among them: it moves memory of its own allocator alone.
    """
    device_protocols: tuple[str, ...]
    """Those of them that reach the device's own memory.

    tcp is not among a GPU's: there Mooncake copies 64 KiB at a time, on the stream that torch computes on.
    """
    alignment_bytes: int = 1
    """Registered regions start at a multiple of this; 1 where any address will do."""
    max_regions: int | None = None
    """Regions that one engine can register; None where there is no fixed limit."""


TRANSPORTS: dict[str, TransportCapability] = {
    "cpu": TransportCapability(mooncake_protocols=("tcp", "rdma"), device_protocols=()),
    "cuda": TransportCapability(mooncake_protocols=("tcp", "rdma"), device_protocols=("rdma",)),
    # Over HCCS, its default within a server, Mooncake registers device memory by pages of 2 MiB
    # (ascend_direct_transport.md); the driver takes 256 regions of a process.
    "npu": TransportCapability(
        mooncake_protocols=("ascend",),
        device_protocols=("ascend",),
        alignment_bytes=2 * 1024 * 1024,
        max_regions=256,
    ),
    # Its memory is the host's.
    "emulated": TransportCapability(mooncake_protocols=("tcp", "rdma"), device_protocols=("tcp", "rdma")),
}
"""By torch device type."""
