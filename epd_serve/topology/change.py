"""The steps from the running instances to the wanted ones while requests run: starts, then switches, then stops.

No clock and no I/O. A change for which there is no room is refused before its first step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from epd_serve.topology.placement import CPU
from epd_serve.types import Role, Stage

#: A stage that has an instance keeps one at every moment. E may be missing: P encodes in its place.
_FLOOR = frozenset({Stage.PREFILL, Stage.DECODE})
_ELSE = "list another device, or stop the deployment and start it anew"


class ChangeImpossible(ValueError):
    """The change cannot be made while the deployment serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """An instance that runs, or one that is wanted.

    Attributes:
        kind: all that a process keeps for as long as it lives; only an instance of this kind can take its place.
        settings: those of its role; a switch to another role brings the wanted ones.
        devices: a device other than the CPU has no room for a second process of another kind.
        roles: roles to which it can be switched; None: all.
    """

    name: str
    role: Role
    kind: Hashable
    settings: Hashable = None
    devices: tuple[str, ...] = (CPU,)
    roles: frozenset[Role] | None = None

    def can_become(self, other: Part) -> bool:
        """Whether a switch makes this instance the other one."""
        is_able = self.roles is None or other.role in self.roles
        return self.kind == other.kind and self.role != other.role and is_able


class StepKind(IntEnum):
    """The kinds of steps, in the order in which they are taken."""

    START = 0
    SWITCH = 1
    STOP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a change; ``role`` is the one that the instance has after it, or had when it is stopped."""

    kind: StepKind
    name: str
    role: Role
    old: Role | None = None

    def __str__(self) -> str:
        if self.kind is StepKind.SWITCH:
            return f"switch {self.name} from {self.old} to {self.role}"
        return f"{self.kind.name.lower()} {self.name} ({self.role})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The steps, and the names that the wanted instances have after them, in the order of ``wanted``."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]


def plan_change(running: Sequence[Part], wanted: Sequence[Part]) -> Change:
    """Plan a change during which P and D, where they have an instance, are never without one that serves.

    A process stays where an instance of its kind and role is wanted, and is switched where one of its kind is. An
    instance on a CPU that no other can stand in for is replaced instead. Raises ChangeImpossible.
    """
    spare, names = {part.name: part for part in running}, dict[int, str]()
    for index, part in enumerate(wanted):
        alike = (part.kind, part.role, part.settings)
        same = (name for name, one in spare.items() if (one.kind, one.role, one.settings) == alike)
        if (kept := next(same, None)) is not None:
            names[index] = kept
            del spare[kept]

    serving = Counter(stage for one in running for stage in one.role.stages)
    occupied = {device for one in running for device in one.devices} - {CPU}
    taken = {part.name for part in running}
    starts: list[Step] = []
    switches: list[Step] = []

    def start(index: int) -> None:
        part = wanted[index]
        if full := sorted(occupied & {*part.devices}):
            raise ChangeImpossible(
                f"{', '.join(full)} has no room for {part.name} ({part.role}) beside what runs there: {_ELSE}"
            )
        stem = re.sub(r"\d+$", "", part.name)
        names[index] = next(name for number in count() if (name := f"{stem}{number}") not in taken)
        taken.add(names[index])
        serving.update(part.role.stages)
        starts.append(Step(kind=StepKind.START, name=names[index], role=part.role))

    moves: list[tuple[str, int]] = []
    for index in [index for index in range(len(wanted)) if index not in names]:
        moving = {name for name, _ in moves}
        able = (name for name, one in spare.items() if name not in moving and one.can_become(wanted[index]))
        if (name := next(able, None)) is None:
            start(index)
        else:
            moves.append((name, index))

    while moves:
        free = (one for one in moves if all(serving[stage] > 1 for stage in spare[one[0]].role.stages & _FLOOR))
        on_cpu = (one for one in moves if {*wanted[one[1]].devices} == {CPU})
        if (move := next(free, None)) is not None:
            name, index = move
            old, new = spare.pop(name).role, wanted[index].role
            serving.subtract(old.stages)
            serving.update(new.stages)
            names[index] = name
            switches.append(Step(kind=StepKind.SWITCH, name=name, role=new, old=old))
        elif (move := next(on_cpu, None)) is not None:
            start(move[1])  # the other is stopped in the end
        else:
            listed = ", ".join(f"{name} ({spare[name].role}) cannot become {wanted[i].role}" for name, i in moves)
            raise ChangeImpossible(f"{listed}, since no other instance has its stages meanwhile: {_ELSE}")
        moves.remove(move)
    stops = [Step(kind=StepKind.STOP, name=one.name, role=one.role, old=one.role) for one in spare.values()]
    return Change(steps=(*starts, *switches, *stops), names=tuple(names[index] for index in range(len(wanted))))
