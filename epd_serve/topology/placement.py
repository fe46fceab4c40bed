"""Named instances with their devices, made from a topology and a list of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat

from epd_serve.topology.notation import Group, Topology, Unit, width_of
from epd_serve.types import Role

#: The one device that several instances may be given without a group: a machine's CPU runs many processes.
CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class InstancePlacement:
    """One instance: its name (``e0``, ``ep1``), its role and where it runs.

    Attributes:
        devices: ``tensor_parallel`` device names, in the order of the deployment's list.
        shares_device_with: names of the instances in the same group of the notation. Instances that merely
            run on the same CPU are not listed.
        index: of the instance in its deployment, from 0; processes on one host have HCCL ports by it.
    """

    name: str
    role: Role
    devices: tuple[str, ...]
    shares_device_with: tuple[str, ...] = ()
    tensor_parallel: int = 1
    index: int = field(default=0, compare=False)


def place(topology: Topology, devices: Sequence[str]) -> tuple[InstancePlacement, ...]:
    """Give each instance its devices, in the order in which both are written.

    A list of nothing but ``cpu`` serves any topology; other devices are used once each. Devices beyond those
    needed stay unused.

    Raises:
        ValueError: there are too few devices, or one that is not the CPU is listed twice.
    """
    return tuple(
        instance for replicas in place_units(topology, devices) for replica in replicas for instance in replica
    )


def place_units(
    topology: Topology, devices: Sequence[str]
) -> tuple[tuple[tuple[InstancePlacement, ...], ...], ...]:
    """As :func:`place`, nested as unit → replica → the instances that share the replica's devices."""
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
    """A function that answers the next free name of a role: e0, e1, p0 ..."""
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
                f"device {device} is listed {times} times; name it once, "
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
