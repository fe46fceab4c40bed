"""A topology as a picture in text, and in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd_serve.topology.notation import Group, Topology
from epd_serve.topology.placement import InstancePlacement, place_units
from epd_serve.types import Role, Stage

_WORK = {
    Stage.ENCODE: ("encode", "images"),
    Stage.PREFILL: ("prefill", "prompts"),
    Stage.DECODE: ("decode", "tokens"),
}
_GAP = 3
_MARGIN = len("features  ")
_INSTANCE_TOP, _INSTANCE_BOTTOM, _DEVICE_BOTTOM = 1, 4, 5


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


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The two columns where an instance's incoming and outgoing lines meet its box."""

    role: Role
    incoming: int
    outgoing: int


def sends_features(source: Role, target: Role) -> bool:
    """Whether encoder output travels between instances of these roles."""
    return source.encodes and target.prefills and not (source.prefills and target.encodes)


def sends_kv(source: Role, target: Role) -> bool:
    """Whether the KV cache travels between instances of these roles."""
    return source.prefills and target.decodes and not (source.decodes and target.prefills)


def draw(topology: Topology) -> str:
    """Boxes for devices with their instances in them, and a line for each kind of transfer.

    Equal replicas are drawn once. The boxes are called "device 0", "device 1" ...
    """
    canvas = Canvas()
    places: list[_Place] = []
    left = _MARGIN if len(topology.members) > 1 else 0
    for device in _devices(topology):
        left = _draw_device(canvas, device, left, places) + _GAP
    row = _DEVICE_BOTTOM + 2
    for label, sends in (("features", sends_features), ("KV", sends_kv)):
        row += _draw_flow(canvas, label, sends, places, row)
    return str(canvas)


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


def _draw_device(canvas: Canvas, device: _Device, left: int, places: list[_Place]) -> int:
    """Draw one device box at ``left``; answers its right edge."""
    column = left + 2
    for instances in device.instances:
        width = max(len(instances.label), len(str(instances.role)), 5)
        right = column + width + 3
        canvas.box(column, _INSTANCE_TOP, right, _INSTANCE_BOTTOM)
        canvas.write(column + 2, _INSTANCE_TOP + 1, instances.label)
        canvas.write(column + 2, _INSTANCE_TOP + 2, str(instances.role))
        places.append(_Place(role=instances.role, incoming=column + 2, outgoing=right - 2))
        column = right + 2
    right = max(column, left + len(device.title) + 5)
    canvas.box(left, 0, right, _DEVICE_BOTTOM)
    canvas.write(left + 2, 0, f" {device.title} ")
    return right


def _draw_flow(
    canvas: Canvas, label: str, sends: Callable[[Role, Role], bool], places: Sequence[_Place], row: int
) -> int:
    """Draw one kind of transfer as a line at ``row`` below the boxes; answers the rows used."""
    sources = [a for a in places if any(sends(a.role, b.role) for b in places)]
    targets = [b for b in places if any(sends(a.role, b.role) for a in places)]
    if not sources:
        return 0
    for source in sources:
        canvas.vertical(source.outgoing, _INSTANCE_BOTTOM, row)
    for target in targets:
        canvas.vertical(target.incoming, _INSTANCE_BOTTOM, row)
        canvas.write(target.incoming, _DEVICE_BOTTOM + 1, "▲")
    columns = [source.outgoing for source in sources] + [target.incoming for target in targets]
    canvas.horizontal(row, min(columns), max(columns))
    canvas.write(0, row, label)
    return 2


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


UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8

_JOINTS = {
    UP | DOWN: "│",
    LEFT | RIGHT: "─",
    RIGHT | DOWN: "┌",
    LEFT | DOWN: "┐",
    UP | RIGHT: "└",
    UP | LEFT: "┘",
    UP | DOWN | RIGHT: "├",
    UP | DOWN | LEFT: "┤",
    LEFT | RIGHT | DOWN: "┬",
    LEFT | RIGHT | UP: "┴",
    UP | RIGHT | DOWN | LEFT: "┼",
}


class Canvas:
    """Cells are addressed by (column, row) from the upper left; text covers lines."""

    __slots__ = ("_lines", "_text")

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], int] = {}
        self._text: dict[tuple[int, int], str] = {}

    def horizontal(self, row: int, left: int, right: int) -> None:
        for column in range(left, right):
            self._join(column, row, RIGHT)
            self._join(column + 1, row, LEFT)

    def vertical(self, column: int, top: int, bottom: int) -> None:
        for row in range(top, bottom):
            self._join(column, row, DOWN)
            self._join(column, row + 1, UP)

    def box(self, left: int, top: int, right: int, bottom: int) -> None:
        self.horizontal(top, left, right)
        self.horizontal(bottom, left, right)
        self.vertical(left, top, bottom)
        self.vertical(right, top, bottom)

    def write(self, column: int, row: int, text: str) -> None:
        for offset, character in enumerate(text):
            self._text[column + offset, row] = character

    def __str__(self) -> str:
        cells = {position: _JOINTS[joint] for position, joint in self._lines.items()} | self._text
        bottom = max((row for _, row in cells), default=-1)
        right = max((column for column, _ in cells), default=-1)
        rows = ("".join(cells.get((column, row), " ") for column in range(right + 1)) for row in range(bottom + 1))
        return "\n".join(row.rstrip() for row in rows)

    def _join(self, column: int, row: int, direction: int) -> None:
        self._lines[column, row] = self._lines.get((column, row), 0) | direction
