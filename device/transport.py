"""Transports that can reach the memory of each type of device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportCapability:
    """Transports that can reach a device's memory."""

    mooncake_protocols: tuple[str, ...]
    """Protocols of Mooncake's Transfer Engine that can reach an instance's buffers, the portable one first.

    rdma needs a network card, ascend an NPU (Mooncake's supported-protocols.md). nvlink is excluded, because it
    moves only memory of its own allocator.
    """
    device_protocols: tuple[str, ...]
    """Protocols that reach the device's own memory.

    A GPU excludes tcp: Mooncake would copy 64 KiB at a time, on the stream that torch computes on.
    """
    alignment_bytes: int = 1
    """Required alignment of registered regions; 1 allows any address."""
    max_regions: int | None = None
    """Maximum regions of one engine; None if unlimited."""


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
