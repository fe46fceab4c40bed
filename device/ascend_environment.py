"""Visible devices and ports of processes that share NPUs. Must not import torch."""

from __future__ import annotations

_PORTS_PER_PROCESS = 16  # taken by HCCL from HCCL_IF_BASE_PORT on
_FIRST_HOST_PORT = 60000  # HCCL's own default
_FIRST_NPU_PORT = 61000


def parse_visible_devices(value: str) -> list[int]:
    """Return the device numbers in ASCEND_RT_VISIBLE_DEVICES.

    Raises ValueError: unlike CUDA's variable it accepts integers and commas only, neither names nor ranges.
    """
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise ValueError(
            f"ASCEND_RT_VISIBLE_DEVICES={value!r}: write distinct device numbers with commas between them, as 0,1"
        )
    return [int(part) for part in parts]


def hccl_environment(process: int) -> dict[str, str]:
    """Return variables that give one of several processes on a host its own HCCL ports.

    Without them two processes on one NPU both ask for port 16666 of its network interface (CANN 9.0 reference,
    HCCL_NPU_SOCKET_PORT_RANGE) and for the host's ports 60000 to 60015 (HCCL_IF_BASE_PORT).

    Args:
        process: 0, 1, ... among the processes of this host.

    Raises ValueError if the ports of the process end beyond 65535.
    """
    offset = process * _PORTS_PER_PROCESS
    first, last = _FIRST_NPU_PORT + offset, _FIRST_NPU_PORT + offset + _PORTS_PER_PROCESS - 1
    if process < 0 or last > 65535:
        raise ValueError(f"HCCL ports {first} to {last} for process {process}: ports run from 1024 to 65535")
    return {
        "HCCL_IF_BASE_PORT": str(_FIRST_HOST_PORT + offset),
        "HCCL_NPU_SOCKET_PORT_RANGE": f"{first}-{last}",
    }
