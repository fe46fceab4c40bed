"""From the instances that run to those that are wanted, while requests run: starts, role switches and stops.

No clock and no I/O. A change is a shortest path through what the deployment may look like on the way
(:func:`plan_change`); carrying it out is the launcher's affair.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import NamedTuple

from epd_serve.topology.placement import CPU
from epd_serve.types import Role

#: Deployments on the way that are looked at; far more than any change needs that is possible.
_MOST_LOOKS = 200_000
#: A stage that has an instance keeps one at every moment. E is no must: P encodes in its place.
_FLOOR = frozenset("PD")


class ChangeImpossible(ValueError):
    """The change cannot be made while the deployment serves."""


class StepKind(IntEnum):
    """In the order in which they are taken where nothing speaks against it."""

    START = 0
    SWITCH = 1
    STOP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """An instance that runs, or one that is wanted.

    Attributes:
        name: of a wanted instance: its name if it has to be started.
        kind: all that a process keeps for as long as it lives; only an instance of this kind can be the wanted
            one.
        devices: on one that is not the CPU there is no room for a second instance, but in parentheses with it.
        is_current: of one that runs: whether it has the settings that are wanted for its role. Where it has not,
            it gets them by a switch to another role.
    """

    name: str
    role: Role
    kind: Hashable
    devices: tuple[str, ...] = (CPU,)
    is_current: bool = True


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


class _Label(NamedTuple):
    """All that distinguishes instances of one kind."""

    role: str
    is_current: bool


#: The instances of each kind, sorted.
_State = tuple[tuple[_Label, ...], ...]


class _Cost(NamedTuple):
    """What is least comes first: starts, then steps without an encoder, switches, stops, steps out of order."""

    starts: int = 0
    gaps: int = 0
    switches: int = 0
    stops: int = 0
    disorder: int = 0

    def plus(self, other: _Cost) -> _Cost:
        return _Cost(*(a + b for a, b in zip(self, other, strict=True)))


class _Move(NamedTuple):
    """An instance of a kind goes from one label to the other; None: it is not there."""

    step: StepKind
    kind: int
    before: _Label | None
    after: _Label | None

    @property
    def label(self) -> _Label:
        """After it, or of an instance that is stopped."""
        label = self.after or self.before
        assert label is not None
        return label

    @property
    def key(self) -> tuple[int, int, _Label]:
        return (self.step, self.kind, self.before or self.label)


def plan_change(running: Sequence[Part], wanted: Sequence[Part]) -> list[Step]:
    """The steps, in order: as few starts as possible, then as few switches.

    At no moment of any step is P or D, where it had an instance, without one that serves; E is where that costs no
    start. Starts come before switches and those before stops, unless a device has to be free first.

    Raises ChangeImpossible where no order of steps keeps that.
    """
    search = _Search(running, wanted)
    pools: dict[tuple[int, _Label], list[str]] = {}
    for kind, label, part in search.labelled(running):
        pools.setdefault((kind, label), []).append(part.name)
    to_start: dict[tuple[int, _Label], list[str]] = {}
    for kind, label, part in search.labelled(wanted):
        to_start.setdefault((kind, label), []).append(part.name)
    steps = []
    for move in search.ordered(search.path()):
        label = move.label
        if move.before is None:
            name, old = to_start[move.kind, label].pop(0), None
        else:
            name, old = pools[move.kind, move.before].pop(), Role.parse(move.before.role)
        if move.after is not None:
            pools.setdefault((move.kind, move.after), []).insert(0, name)  # those that had the role go first
        steps.append(Step(kind=move.step, name=name, role=Role.parse(label.role), old=old))
    return steps


class _Search:
    """A* over multisets of instances: which of several equal ones is taken does not matter."""

    def __init__(self, running: Sequence[Part], wanted: Sequence[Part]) -> None:
        parts = {part.kind: part for part in (*wanted, *running)}
        self._kinds = list(parts)
        self._devices = [frozenset(parts[kind].devices) - {CPU} for kind in self._kinds]
        self._widths = [len(parts[kind].devices) for kind in self._kinds]
        self._goal = self._state(wanted)
        self._start = self._state(running)
        self._counts_encoders = all(any(part.role.encodes for part in parts) for parts in (running, wanted))
        bridge = "EPD" if self._counts_encoders else "PD"  # for a while, where others change places
        self._choices = [sorted({label.role for label in labels} | {bridge}) for labels in self._goal]

    def labelled(self, parts: Sequence[Part]) -> Iterator[tuple[int, _Label, Part]]:
        for part in parts:
            yield self._kinds.index(part.kind), _Label(str(part.role), part.is_current), part

    def path(self) -> list[_Move]:
        """Raises ChangeImpossible."""
        numbers = count()
        best = {self._start: _Cost()}
        came: dict[_State, tuple[_State, _Move]] = {}
        heap: list[tuple[_Cost, int, tuple[object, ...], int, _State, _Cost]] = []
        heapq.heappush(heap, (self._estimate(self._start), 0, (), next(numbers), self._start, _Cost()))
        looks = 0
        while heap and looks < _MOST_LOOKS:
            _, depth, _, _, state, cost = heapq.heappop(heap)
            if state == self._goal:
                return self._back(came)
            if cost > best[state]:
                continue
            looks += 1
            last = came[state][1].key if state in came else (0, 0, _Label("", False))
            for move, after, has_encoder in self._moves(state):
                gap = int(self._counts_encoders and not has_encoder)
                one = [0, 0, 0]
                one[move.step] = 1
                step = _Cost(one[0], gap, one[1], one[2], int(move.key < last))
                total = cost.plus(step)
                if after not in best or total < best[after]:
                    best[after], came[after] = total, (state, move)
                    estimate = total.plus(self._estimate(after))
                    heapq.heappush(heap, (estimate, depth - 1, move.key, next(numbers), after, total))
        raise ChangeImpossible(
            "there is no way to the new deployment on which each stage keeps an instance and each device has one "
            "process at a time; list another device, or stop the deployment and start it from the new file"
        )

    def ordered(self, moves: Sequence[_Move]) -> list[_Move]:
        """Starts at first and stops at last, where no device has to be free for them: more serves meanwhile."""

        def place(move: _Move) -> int:
            if self._devices[move.kind]:
                return StepKind.SWITCH
            return move.step

        return sorted(moves, key=place)

    def _back(self, came: dict[_State, tuple[_State, _Move]]) -> list[_Move]:
        moves, state = [], self._goal
        while state != self._start:
            state, move = came[state]
            moves.append(move)
        return moves[::-1]

    def _moves(self, state: _State) -> Iterator[tuple[_Move, _State, bool]]:
        """Each possible move, what follows from it, and whether something encodes meanwhile."""
        roles = Counter(label.role for labels in state for label in labels)
        covered = frozenset("".join(roles))
        for kind, labels in enumerate(state):
            goal = self._goal[kind]
            for label in sorted(set(goal)):
                if goal.count(label) > labels.count(label) and self._has_room(state, kind):
                    move = _Move(StepKind.START, kind, None, label)
                    yield move, _with(state, kind, None, label), "E" in covered
            for label in sorted(set(labels)):
                left = frozenset("".join((roles - Counter([label.role])).keys()))
                if (covered - left) & _FLOOR:
                    continue
                for role in self._choices[kind]:
                    after = _Label(role, True)
                    if role != label.role and (self._widths[kind] == 1 or set(role) & _FLOOR):
                        move = _Move(StepKind.SWITCH, kind, label, after)
                        yield move, _with(state, kind, label, after), "E" in left
                if len(labels) > len(goal):
                    move = _Move(StepKind.STOP, kind, label, None)
                    yield move, _with(state, kind, label, None), "E" in left

    def _has_room(self, state: _State, kind: int) -> bool:
        devices = self._devices[kind]
        if not devices:
            return True
        return len(state[kind]) < len(self._goal[kind]) and all(
            len(labels) <= len(goal)
            for labels, goal, theirs in zip(state, self._goal, self._devices, strict=True)
            if theirs & devices
        )

    def _estimate(self, state: _State) -> _Cost:
        """At least so much is left."""
        starts = switches = stops = 0
        for labels, goal in zip(state, self._goal, strict=True):
            starts += max(0, len(goal) - len(labels))
            stops += max(0, len(labels) - len(goal))
            switches += min(len(goal), len(labels)) - (Counter(labels) & Counter(goal)).total()
        return _Cost(starts, 0, switches, stops)

    def _state(self, parts: Sequence[Part]) -> _State:
        labels: list[list[_Label]] = [[] for _ in self._kinds]
        for kind, label, _ in self.labelled(parts):
            labels[kind].append(label)
        return tuple(tuple(sorted(one)) for one in labels)


def _with(state: _State, kind: int, before: _Label | None, after: _Label | None) -> _State:
    labels = list(state[kind])
    if before is not None:
        labels.remove(before)
    if after is not None:
        labels.append(after)
    return (*state[:kind], tuple(sorted(labels)), *state[kind + 1 :])
