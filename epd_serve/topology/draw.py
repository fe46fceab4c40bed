"""A topology as a text picture and in words."""

from __future__ import annotations

from itertools import islice

from rich.box import SQUARE
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from epd_serve.topology.notation import Group, Member, Topology, members_of, sends_features, sends_kv
from epd_serve.topology.placement import place_units
from epd_serve.types import Stage

_WORK = {
    Stage.ENCODE: ("encode", "images"),
    Stage.PREFILL: ("prefill", "prompts"),
    Stage.DECODE: ("decode", "tokens"),
}
#: The instances of a member: their label, "e0" or "e0…e3", and their number.
_Instances = tuple[str, int, Member]


def draw(topology: Topology) -> str:
    """Return boxes for devices and the instances in them; equal replicas are drawn once."""
    console, boxes = Console(color_system=None), list[Panel]()
    for title, instances in _boxes(topology):
        row = Table.grid()
        row.add_row(*(Panel.fit(f"{label}\n{member.role}", box=SQUARE) for label, _, member in instances))
        boxes.append(Panel.fit(row, title=title, title_align="left", box=SQUARE))
    with console.capture() as captured:
        console.print(Columns(boxes))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def explain(topology: Topology) -> list[str]:
    """Return a sentence for each device of the picture, and for the transfers between instances."""
    sentences = list[str]()
    for title, instances in _boxes(topology):
        isolated = "; isolated from each other" if len(instances) > 1 else ""
        sentences.append(f"{title}: {'; '.join(map(_describe, instances))}{isolated}.")
    roles = [member.role for member in topology.members]
    pairs = [(source, target) for source in roles for target in roles]
    if any(sends_features(source, target) for source, target in pairs):
        sentences.append("Features (encoder output) travel from encode to prefill instances.")
    if any(sends_kv(source, target) for source, target in pairs):
        sentences.append("The KV cache travels from prefill to decode instances.")
    if Stage.ENCODE not in topology.stages:
        sentences.append("Prefill instances encode images themselves.")
    return sentences


def _boxes(topology: Topology) -> list[tuple[str, list[_Instances]]]:
    """Return a title and the instances of each unit."""
    devices = [f"device {index}" for index in range(topology.num_devices)]
    boxes = []
    for unit, replicas in zip(topology.units, place_units(topology, devices), strict=True):
        columns = iter(zip(*replicas, strict=True))  # the n-th instance of every replica
        instances: list[_Instances] = []
        for member in members_of(unit):
            own = islice(columns, member.count if isinstance(unit, Group) else 1)
            names = sorted((one.name for column in own for one in column), key=lambda name: (len(name), name))
            instances.append((_join(names[0], names[-1]), len(names), member))
        used = [max((instance.devices for instance in replica), key=len) for replica in replicas]
        title = _join(used[0][0], used[-1][-1])
        boxes.append((title if len(used) == 1 else f"{len(used)} × {title}", instances))
    return boxes


def _join(first: str, last: str) -> str:
    return first if first == last else f"{first}…{last.removeprefix('device ')}"


def _describe(instances: _Instances) -> str:
    label, count, member = instances
    verbs = [_WORK[stage] for stage in Stage if stage in member.role.stages]
    work = [f"{verb}{'' if count > 1 else 's'} {objects}" for verb, objects in verbs]
    listed = " and ".join(filter(None, (", ".join(work[:-1]), work[-1])))
    width = f", each on {member.tensor_parallel} devices" if member.tensor_parallel > 1 else ""
    return f"{label} {listed}{width}"
