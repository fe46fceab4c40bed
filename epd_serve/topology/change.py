"""The steps from the running instances to the wanted ones, while requests run: starts, then switches, then stops.

No clock and no I/O. A change for which there is no room is refused before its first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from epd_serve.topology.placement import CPU
from epd_serve.types import Role, Stage

#: A stage that has an instance keeps one at every moment. E is no must: P encodes in its place.
_FLOOR = frozenset({Stage.PREFILL, Stage.DECODE})
#: What is always possible.
_ANEW = "stop the deployment and start it from the new file"


class ChangeImpossible(ValueError):
    """The change cannot be made while the deployment serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """An instance that runs, or one that is wanted.

    Attributes:
        name: its name; that of a wanted instance is for its start.
        kind: all that a process keeps for as long as it lives; only an instance of this kind can be the wanted
            one.
        devices: its devices; only the CPU, or parentheses, have room for a second instance.
        is_current: of one that runs: whether it has the settings that are wanted for its role. Where it has not,
            it gets them by a switch to another role.
        roles: roles to which it can be switched; None: all.
    """

    name: str
    role: Role
    kind: Hashable
    devices: tuple[str, ...] = (CPU,)
    is_current: bool = True
    roles: frozenset[Role] | None = None

    @property
    def accelerators(self) -> frozenset[str]:
        return frozenset(self.devices) - {CPU}

    @property
    def floor(self) -> frozenset[Stage]:
        """Its stages that must have an instance at every moment."""
        return self.role.stages & _FLOOR

    def can_become(self, role: Role) -> bool:
        """Whether it can be switched to a role: a tensor-parallel instance stays a language model."""
        if self.roles is not None:
            return role in self.roles
        return len(self.devices) == 1 or role.has_language_model


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


def plan_change(running: Sequence[Part], wanted: Sequence[Part]) -> list[Step]:
    """The steps of a change: all starts, then all switches, then all stops.

    An instance keeps its process where another one of its kind is wanted. At no moment is P or D, where it had an
    instance, without one that serves. Where the switches alone cannot keep that, one instance serves all stages
    meanwhile; if none can, a CPU gets one more process instead of a switch.

    Raises ChangeImpossible with what would be possible instead.
    """
    change = _Change(running, wanted)
    change.start_missing()
    while any(change.missing.values()):
        if not (change.switch_one() or change.switch_aside() or change.start_instead()):
            raise ChangeImpossible(change.problem())
    return [*change.starts, *change.switches, *change.stops]


class _Change:
    """A change that is being planned.

    Attributes:
        now: the instances after the steps so far, by name.
        spare: the names of those that are not wanted as they are.
        missing: the wanted instances that are not there yet, by kind.
    """

    def __init__(self, running: Sequence[Part], wanted: Sequence[Part]) -> None:
        self.starts: list[Step] = []
        self.switches: list[Step] = []
        self.now = {part.name: part for part in running}
        self.spare = list(self.now)
        self.missing: dict[Hashable, list[Part]] = {}
        self._surplus = Counter(part.kind for part in running) - Counter(part.kind for part in wanted)
        all_encode = all(any(part.role.encodes for part in parts) for parts in (running, wanted))
        able = any(part.can_become(Role.parse("EPD")) for part in running)
        self._all_stages = Role.parse("EPD" if all_encode and able else "PD")
        self._aside = ""  # who serves all stages meanwhile
        self._kept: dict[str, Part] = {}  # the wanted instance that one is, or has become
        for part in reversed(wanted):  # the first names are for those that are started
            name = next((name for name in self.spare if _is_same(self.now[name], part)), None)
            if name is None:
                self.missing.setdefault(part.kind, []).insert(0, part)
            else:
                self.spare.remove(name)
                self._kept[name] = part

    def start_missing(self) -> None:
        """Start as many of each kind as are wanted beyond those that run, first those that serve P and D.

        Raises ChangeImpossible where a device has no room.
        """
        for parts in list(self.missing.values()):
            spare = [self.now[name].role for name in self.spare if self.now[name].kind == parts[0].kind]
            in_order = sorted(parts, key=lambda part: (part.role not in spare, -len(part.floor)))
            for part in in_order[: max(0, len(parts) - len(spare))]:
                self._check_room(part)
                self._start(part)

    def switch_one(self) -> bool:
        """Take the switch that leaves most of what serves; return whether there is one."""
        serving = self._serving()
        moves = [
            (*self._rank(one, role, serving), name, role)
            for name in self.spare
            if _can_leave(one := self.now[name], serving)
            for role in dict.fromkeys(part.role for part in self.missing.get(one.kind, ()))
            if one.can_become(role)
        ]
        if not moves:
            return False
        *_, name, role = min(moves, key=lambda move: move[:-2])
        one = self.now[name]
        if one.role == role:  # a switch to another role and back brings the new settings
            self._switch(name, self._other(role))
        self._switch(name, role)
        self.spare.remove(name)
        parts = self.missing[one.kind]
        self._kept[name] = next(part for part in reversed(parts) if part.role == role)
        parts.remove(self._kept[name])
        return True

    def switch_aside(self) -> bool:
        """Have one instance serve all stages while others change; return whether one can.

        One that this change starts on a CPU does not: a CPU has room for what is missing.
        """
        serving, role = self._serving(), self._all_stages
        started = {step.name for step in self.starts if not self.now[step.name].accelerators}
        able = [
            (*self._rank(one, role, serving), len(one.floor), name)
            for name, one in self.now.items()
            if name not in started and one.role != role and one.can_become(role) and _can_leave(one, serving)
        ]
        if self._aside or not able:
            return False
        self._aside = name = min(able)[-1]
        if name not in self.spare:
            self.spare.append(name)
            self.missing.setdefault(self.now[name].kind, []).append(self._kept[name])
        self._switch(name, role)
        return True

    def start_instead(self) -> bool:
        """Start one more on a CPU, in place of a switch; return whether one can be started."""
        parts = [part for parts in self.missing.values() for part in parts if not part.accelerators]
        if parts:
            self._start(max(parts, key=lambda part: len(part.floor)))
        return bool(parts)

    def problem(self) -> str:
        """The reason why no further step is possible, and what would be."""
        roles = sorted({str(part.role) for parts in self.missing.values() for part in parts})
        names = [name for name in self.spare if self.missing.get(self.now[name].kind)]
        listed = ", ".join(f"{name} ({self.now[name].role})" for name in names)
        return (
            f"{listed} cannot become {', '.join(roles)} while the deployment serves: no other instance has the "
            f"stages meanwhile; list another device with an instance of them first, or {_ANEW}"
        )

    @property
    def stops(self) -> list[Step]:
        """The steps that end what is spare once nothing is missing."""
        ending = (self.now[name] for name in self.spare)
        return [Step(kind=StepKind.STOP, name=one.name, role=one.role, old=one.role) for one in ending]

    # ------------------------------------------------------------------ parts

    def _start(self, part: Part) -> None:
        self.missing[part.kind].remove(part)
        self.now[part.name] = self._kept[part.name] = part
        self.starts.append(Step(kind=StepKind.START, name=part.name, role=part.role))

    def _switch(self, name: str, role: Role) -> None:
        old = self.now[name]
        self.now[name] = replace(old, role=role, is_current=True)
        self.switches.append(Step(kind=StepKind.SWITCH, name=name, role=role, old=old.role))

    def _check_room(self, part: Part) -> None:
        """Raise ChangeImpossible where a device that the process needs is another's that is stopped only later."""
        there = [
            f"{name} ({one.role})"
            for name, one in self.now.items()
            if self._surplus[one.kind] and one.accelerators & part.accelerators
        ]
        if there:
            raise ChangeImpossible(
                f"{', '.join(sorted(part.accelerators))} has no room for {part.name} ({part.role}) beside "
                f"{', '.join(there)}, which would have to end first: apply a file without it before this one, "
                f"list another device, or {_ANEW}"
            )

    def _serving(self) -> Counter[Stage]:
        """The number of instances of each stage."""
        return Counter(stage for one in self.now.values() for stage in one.role.stages)

    def _rank(self, one: Part, role: Role, serving: Counter[Stage]) -> tuple[bool, bool, bool, int]:
        """The order among possible switches; the least is taken.

        The instance that serves all stages meanwhile comes last; an encoder is kept, then as many as possible of
        the stage with the fewest.
        """
        leaves_gap = one.role.encodes and serving[Stage.ENCODE] == 1
        fewest = min(serving[stage] - (stage in one.role.stages) for stage in _FLOOR)
        return one.name == self._aside, leaves_gap, one.role == role, -fewest

    def _other(self, role: Role) -> Role:
        """A role to be in for a moment, on the way back to ``role``."""
        if role != self._all_stages:
            return self._all_stages
        return Role.parse("PD" if role.encodes else "P")


def _is_same(running: Part, wanted: Part) -> bool:
    return running.kind == wanted.kind and running.role == wanted.role and running.is_current


def _can_leave(one: Part, serving: Counter[Stage]) -> bool:
    """Whether P and D are served without this one."""
    return all(serving[stage] > 1 for stage in one.floor)
