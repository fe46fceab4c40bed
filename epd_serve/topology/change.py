"""The steps from the running instances to the wanted ones while requests run: starts, then switches, then stops.

Pure. A change for which devices are missing is refused before its first step.
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

#: Stages that must always keep an instance; E may be missing, as P can encode.
_FLOOR = frozenset({Stage.PREFILL, Stage.DECODE})
_ELSE = "list another device, or stop and restart the deployment"


class ChangeImpossible(ValueError):
    """The change cannot be made while the deployment serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A running or wanted instance.

    Attributes:
        kind: everything that a running process cannot change; only an instance of this kind can replace it.
        settings: settings of its role; a switch to another role applies the wanted ones.
        devices: only the CPU has room for a second process of another kind.
        roles: roles available to a switch; None for all.
    """

    name: str
    role: Role
    kind: Hashable
    settings: Hashable = None
    devices: tuple[str, ...] = (CPU,)
    roles: frozenset[Role] | None = None

    def can_become(self, other: Part) -> bool:
        """Return whether a role switch turns this instance into the other one."""
        is_able = self.roles is None or other.role in self.roles
        return self.kind == other.kind and self.role != other.role and is_able


class StepKind(IntEnum):
    """The kinds of steps, in order."""

    START = 0
    SWITCH = 1
    STOP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a change; ``role`` is the instance's role after it, or when it is stopped."""

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
    """Return the steps, and the names of the wanted instances after them, in the order of ``wanted``."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]


def plan_change(running: Sequence[Part], wanted: Sequence[Part]) -> Change:
    """Plan a change during which P and D, if they have instances, always keep one that serves.

    A process stays if an instance of its kind and role is wanted, and is switched if one of its kind is. If a
    switch would leave a stage without an instance, an instance on a CPU is replaced instead. Raises
    ChangeImpossible.
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
                f"{', '.join(full)} lacks room for {part.name} ({part.role}) next to a running instance: {_ELSE}"
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
            start(move[1])  # the old one is stopped at the end
        else:
            listed = ", ".join(f"{name} ({spare[name].role}) cannot become {wanted[i].role}" for name, i in moves)
            raise ChangeImpossible(f"{listed}, as no other instance covers its stages until then: {_ELSE}")
        moves.remove(move)
    stops = [Step(kind=StepKind.STOP, name=one.name, role=one.role, old=one.role) for one in spare.values()]
    return Change(steps=(*starts, *switches, *stops), names=tuple(names[index] for index in range(len(wanted))))
