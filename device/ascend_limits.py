"""The limits of an NPU that several processes share: streams, events, updatable tasks, ports.

A deployment that exceeds them is refused before it starts. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Per device and over all its processes, Atlas A2 and A3; CANN 8.5 reference: aclrtCreateStream,
# aclrtCreateEventWithFlag (ACL_EVENT_EXTERNAL), aclmdlRICaptureTaskUpdateBegin.
MAX_STREAMS = 1984
MAX_EVENTS = 65536
MAX_UPDATABLE_TASKS = 1024 * 1024

_PORTS_PER_PROCESS = 16  # taken by HCCL from HCCL_IF_BASE_PORT on
_FIRST_HOST_PORT = 60000  # HCCL's own default
_FIRST_NPU_PORT = 61000


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceUse:
    """Resources of a shared NPU that one instance takes.

    Attributes:
        num_streams: open streams, including the default one.
        num_graphs: captured decode batch sizes.
        num_layers: attention layers in each graph; each one needs a task group and an event.
    """

    num_streams: int
    num_graphs: int = 0
    num_layers: int = 0

    @property
    def streams(self) -> int:
        """Streams of the process, plus one for each graph."""
        return self.num_streams + self.num_graphs

    @property
    def tasks(self) -> int:
        """Attention calls to update before each replay; each has an event."""
        return self.num_graphs * self.num_layers


def check_colocation(instances: Mapping[str, InstanceUse]) -> None:
    """Raise ValueError, with the numbers, if the named instances need more than one NPU has."""
    budgets = (
        ("streams", MAX_STREAMS, {name: use.streams for name, use in instances.items()}),
        ("events", MAX_EVENTS, {name: use.tasks for name, use in instances.items()}),
        ("updatable tasks", MAX_UPDATABLE_TASKS, {name: use.tasks for name, use in instances.items()}),
    )
    for resource, limit, needs in budgets:
        excess = sum(needs.values()) - limit
        if excess <= 0:
            continue
        shares = ", ".join(f"{name} {count}" for name, count in needs.items())
        raise ValueError(
            f"one NPU has {limit} {resource}, but its instances need {limit + excess} ({shares}): "
            f"{_remedy(instances, resource, needs, excess)}"
        )


def _remedy(instances: Mapping[str, InstanceUse], resource: str, needs: Mapping[str, int], excess: int) -> str:
    largest = max(needs, key=lambda name: needs[name])
    use = instances[largest]
    per_graph = 1 if resource == "streams" else use.num_layers
    graphs = use.num_graphs - -(-excess // per_graph) if per_graph else 0
    if graphs >= 1:
        return f"let {largest} capture {graphs} batch sizes instead of {use.num_graphs}, or move an instance away"
    return "move an instance to another NPU"


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
