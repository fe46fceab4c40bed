"""The instances of a topology with their names and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat

from epd_serve.topology.notation import Group, Topology, members_of, width_of
from epd_serve.types import Role

#: The only device that instances can share without a group.
CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class InstancePlacement:
    """One instance: its name (``e0``, ``ep1``), role and devices.

    Attributes:
        devices: ``tensor_parallel`` device names, in the order of the deployment's list.
        shares_device_with: names of the other instances in its group.
        index: index of the instance in its deployment, from 0; selects HCCL ports.
    """

    name: str
    role: Role
    devices: tuple[str, ...]
    shares_device_with: tuple[str, ...] = ()
    tensor_parallel: int = 1
    index: int = field(default=0, compare=False)


def place(topology: Topology, devices: Sequence[str]) -> tuple[InstancePlacement, ...]:
    """Assign devices to instances, in the order in which both are written.

    A list of only ``cpu`` serves any topology; other devices are used once each, surplus ones not at all. Raises
    ValueError if devices are missing, or one other than the CPU is listed twice.
    """
    return tuple(
        instance for replicas in place_units(topology, devices) for replica in replicas for instance in replica
    )


def place_units(
    topology: Topology, devices: Sequence[str]
) -> tuple[tuple[tuple[InstancePlacement, ...], ...], ...]:
    """Do as :func:`place`, and return the instances nested by unit and replica."""
    remaining, indices, used = _devices(topology, devices), count(), Counter[str]()
    units = []
    for unit in topology.units:
        members = [one for one in members_of(unit) for _ in range(one.count if isinstance(unit, Group) else 1)]
        replicas = []
        for _ in range(unit.count):
            own, names = tuple(islice(remaining, width_of(unit))), []
            for member in members:
                stem = str(member.role).lower()
                names.append(f"{stem}{used[stem]}")
                used[stem] += 1
            replicas.append(
                tuple(
                    InstancePlacement(
                        name=name,
                        role=member.role,
                        devices=own[: member.tensor_parallel],
                        shares_device_with=tuple(other for other in names if other != name),
                        tensor_parallel=member.tensor_parallel,
                        index=next(indices),
                    )
                    for name, member in zip(names, members, strict=True)
                )
            )
        units.append(tuple(replicas))
    return tuple(units)


def _devices(topology: Topology, devices: Sequence[str]) -> Iterator[str]:
    for device, times in Counter(devices).items():
        if times > 1 and device != CPU:
            raise ValueError(
                f"device {device} is listed {times} times; list it once, "
                "and put instances that share it in parentheses, as in '(E-P)-D'"
            )
    if devices and set(devices) == {CPU}:
        return repeat(CPU)
    if len(devices) < topology.num_devices:
        listed = ", ".join(devices) or "none"
        needed = topology.num_devices
        raise ValueError(
            f"topology {topology} needs {needed} device{'s' if needed > 1 else ''}, "
            f"but the list has {len(devices)} ({listed})"
        )
    return iter(devices)
