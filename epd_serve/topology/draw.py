"""A topology as a picture in text, and in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SQUARE
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from epd_serve.topology.notation import Group, Topology, sends_features, sends_kv
from epd_serve.topology.placement import InstancePlacement, place_units
from epd_serve.types import Role, Stage

_WORK = {
    Stage.ENCODE: ("encode", "images"),
    Stage.PREFILL: ("prefill", "prompts"),
    Stage.DECODE: ("decode", "tokens"),
}


@dataclass(frozen=True, kw_only=True)
class _Instances:
    """Equal instances of one unit, drawn as one box: "e0", or "e0…e3" for four of them."""

    label: str
    role: Role
    count: int
    tensor_parallel: int


@dataclass(frozen=True, kw_only=True)
class _Device:
    """One unit of the notation, drawn as one box with a title."""

    title: str
    instances: tuple[_Instances, ...]


def draw(topology: Topology) -> str:
    """Return boxes for devices with their instances in them. Equal replicas are drawn once."""
    console = Console(color_system=None)
    with console.capture() as captured:
        console.print(Columns([_draw_device(device) for device in _devices(topology)]))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _draw_device(device: _Device) -> Panel:
    instances = Table.grid()
    instances.add_row(*(Panel.fit(f"{one.label}\n{one.role}", box=SQUARE) for one in device.instances))
    return Panel.fit(instances, title=device.title, title_align="left", box=SQUARE)


def explain(topology: Topology) -> list[str]:
    """One sentence for each device box of the picture, then what travels between instances."""
    sentences = [_describe(device) for device in _devices(topology)]
    roles = [member.role for member in topology.members]
    pairs = [(source, target) for source in roles for target in roles]
    if any(sends_features(source, target) for source, target in pairs):
        sentences.append("Features (encoder output) travel from the encoding to the prefilling instances.")
    if any(sends_kv(source, target) for source, target in pairs):
        sentences.append("The KV cache travels from the prefilling to the decoding instances.")
    if topology.text_only:
        sentences.append("No instance is for encoding: those that prefill encode images themselves.")
    return sentences


def _devices(topology: Topology) -> list[_Device]:
    devices = [f"device {index}" for index in range(topology.num_devices)]
    boxes = []
    for unit, replicas in zip(topology.units, place_units(topology, devices), strict=True):
        members = unit.members if isinstance(unit, Group) else (unit,)
        columns = list(zip(*replicas, strict=True))  # the n-th instance of every replica
        instances = []
        for member in members:
            per_replica = member.count if isinstance(unit, Group) else 1
            equal = [instance for column in columns[:per_replica] for instance in column]
            del columns[:per_replica]
            instances.append(
                _Instances(
                    label=_label(equal),
                    role=member.role,
                    count=len(equal),
                    tensor_parallel=member.tensor_parallel,
                )
            )
        used = [max((instance.devices for instance in replica), key=len) for replica in replicas]
        boxes.append(_Device(title=_title(used), instances=tuple(instances)))
    return boxes


def _label(instances: Sequence[InstancePlacement]) -> str:
    names = sorted((instance.name for instance in instances), key=lambda name: (len(name), name))
    return names[0] if len(names) == 1 else f"{names[0]}…{names[-1]}"


def _title(replica_devices: Sequence[tuple[str, ...]]) -> str:
    first, last = replica_devices[0], replica_devices[-1]
    names = list(dict.fromkeys((first[0], last[-1])))
    title = "…".join(names) if len(names) == 1 else f"{names[0]}…{names[1].removeprefix('device ')}"
    return title if len(replica_devices) == 1 else f"{len(replica_devices)} × {title}"


def _describe(device: _Device) -> str:
    works = []
    for instances in device.instances:
        ending = "" if instances.count > 1 else "s"
        work = [
            f"{verb}{ending} {what}"
            for verb, what in (_WORK[stage] for stage in Stage if stage in instances.role.stages)
        ]
        listed = " and ".join(filter(None, (", ".join(work[:-1]), work[-1])))
        width = f", each on {instances.tensor_parallel} devices" if instances.tensor_parallel > 1 else ""
        works.append(f"{instances.label} {listed}{width}")
    isolated = "; isolated from each other" if len(works) > 1 else ""
    return f"{device.title}: {'; '.join(works)}{isolated}."
