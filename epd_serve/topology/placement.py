"""The instances of a topology with their names and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat

from epd_serve.topology.notation import Group, Topology, Unit, width_of
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
    remaining, names, indices = _devices(topology, devices), _names(), count()
    return tuple(
        tuple(
            _place_replica(unit, tuple(islice(remaining, width_of(unit))), names, indices)
            for _ in range(unit.count)
        )
        for unit in topology.units
    )


def _place_replica(
    unit: Unit, devices: tuple[str, ...], names: Callable[[Role], str], indices: Iterator[int]
) -> tuple[InstancePlacement, ...]:
    if isinstance(unit, Group):
        members = [member for member in unit.members for _ in range(member.count)]
    else:
        members = [unit]
    named = [(names(member.role), member) for member in members]
    return tuple(
        InstancePlacement(
            name=name,
            role=member.role,
            devices=devices[: member.tensor_parallel],
            shares_device_with=tuple(other for other, _ in named if other != name),
            tensor_parallel=member.tensor_parallel,
            index=next(indices),
        )
        for name, member in named
    )


def _names() -> Callable[[Role], str]:
    """Return a function that returns the next name of a role: e0, e1, p0 ..."""
    used: Counter[str] = Counter()

    def next_name(role: Role) -> str:
        stem = str(role).lower()
        used[stem] += 1
        return f"{stem}{used[stem] - 1}"

    return next_name


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
