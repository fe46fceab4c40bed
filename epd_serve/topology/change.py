"""The steps from the running instances to the wanted ones, while requests run: starts, role switches and stops.

No clock and no I/O. A change is a shortest path through the states of the deployment on the way
(:func:`plan_change`); carrying it out is the launcher's affair.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import count
from typing import NamedTuple

from epd_serve.topology.change_states import (
    Label,
    Occupants,
    Part,
    Sites,
    State,
    has_room,
    label_of,
    missing,
    steps_left,
    with_label,
)
from epd_serve.types import Role

#: Deployments on the way that are looked at; far more than any change needs that is possible.
_MOST_LOOKS = 50_000
#: A stage that has an instance keeps one at every moment. E is no must: P encodes in its place.
_FLOOR = frozenset("PD")


class ChangeImpossible(ValueError):
    """The change cannot be made while the deployment serves."""


class ChangeNotFound(ValueError):
    """Whether the change can be made while the deployment serves is not known."""


class StepKind(IntEnum):
    """The kinds of steps, in the order in which they are taken where nothing speaks against it."""

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


class _Cost(NamedTuple):
    """The cost of a change; the least is by starts, then steps without an encoder, then switches, then stops."""

    starts: int = 0
    gaps: int = 0
    switches: int = 0
    stops: int = 0

    def plus(self, other: _Cost) -> _Cost:
        return _Cost(*(a + b for a, b in zip(self, other, strict=True)))


class _Move(NamedTuple):
    """An instance goes from one label to the other (None: it is not there) on a site that has these occupants."""

    step: StepKind
    plan: int
    occupants: Occupants
    kind: int
    before: Label | None
    after: Label | None

    @property
    def label(self) -> Label:
        """The label after the move; that before it of an instance that is stopped."""
        label = self.after or self.before
        assert label is not None
        return label


def plan_change(running: Sequence[Part], wanted: Sequence[Part]) -> list[Step]:
    """The steps, in order: as few starts as possible, then as few switches.

    At no moment of any step is P or D, where it had an instance, without one that serves; E is where that costs no
    start. Starts come before switches and those before stops, unless a device has to be free first; then one
    device follows the other.

    Raises:
        ChangeImpossible: no order of steps keeps that.
        ChangeNotFound: none was found in time, and there may be one.
    """
    search = _Search(running, wanted)
    pools: dict[tuple[int, Label], list[str]] = {}
    for part in running:
        pools.setdefault((search.sites.number_of(part.kind), label_of(part)), []).append(part.name)
    to_start: dict[tuple[int, Label], list[str]] = {}
    for part in wanted:
        to_start.setdefault((search.sites.number_of(part.kind), label_of(part)), []).append(part.name)
    steps = []
    for kind, move in search.placed(search.path()):
        label = move.label
        if move.before is None:
            name, old = to_start[kind, label].pop(0), None
        else:
            name, old = pools[kind, move.before].pop(), Role.parse(move.before.role)
        if move.after is not None:
            pools.setdefault((kind, move.after), []).insert(0, name)  # those that had the role go first
        steps.append(Step(kind=move.step, name=name, role=Role.parse(label.role), old=old))
    return steps


class _Search:
    """A* over states: which of several equal instances is taken, or of several equal devices, does not matter."""

    def __init__(self, running: Sequence[Part], wanted: Sequence[Part]) -> None:
        self._counts_encoders = all(any(part.role.encodes for part in parts) for parts in (running, wanted))
        self.sites = Sites(running, wanted, bridge="EPD" if self._counts_encoders else "PD")
        self._plans = self.sites.plans
        self._left = cache(steps_left)

    def path(self) -> list[_Move]:
        """The moves of the cheapest path. Raises ChangeImpossible and ChangeNotFound."""
        start, goal = self.sites.start, self.sites.goal
        numbers = count()
        best = {start: _Cost()}
        came: dict[State, tuple[State, _Move]] = {}
        heap: list[tuple[_Cost, int, tuple[object, ...], int, State, _Cost]] = []
        heapq.heappush(heap, (self._estimate(start), 0, (), next(numbers), start, _Cost()))
        looks = 0
        while heap:
            _, depth, _, _, state, cost = heapq.heappop(heap)
            if state == goal:
                return _back(came, goal)
            if cost > best[state]:
                continue
            if looks == _MOST_LOOKS:
                raise ChangeNotFound(
                    f"a search of {looks} steps found no way to the new deployment, though there may be one; "
                    "apply a part of the change first, or stop the deployment and start it from the new file"
                )
            looks += 1
            for move, after, has_encoder in self._moves(state):
                one = [0, 0, 0]
                one[move.step] = 1
                total = cost.plus(_Cost(one[0], int(self._counts_encoders and not has_encoder), one[1], one[2]))
                if after not in best or total < best[after]:
                    best[after], came[after] = total, (state, move)
                    estimate = total.plus(self._estimate(after))
                    heapq.heappush(
                        heap, (estimate, depth - 1, self._key(move, after), next(numbers), after, total)
                    )
        raise ChangeImpossible(
            "there is no way to the new deployment on which each stage keeps an instance and each device has one "
            "process at a time; list another device, or stop the deployment and start it from the new file"
        )

    def placed(self, path: Sequence[_Move]) -> list[tuple[int, _Move]]:
        """Each move with the number of the kind that it is for: of alike sites the first.

        Starts come at first and stops at last, where no device has to be free for them: more serves meanwhile.
        """
        free = {
            (plan, occupants): [site for site, one in enumerate(sites) if one == occupants]
            for plan, sites in enumerate(self.sites.occupants)
            for occupants in sites
        }
        found = []
        for move in path:
            site = free[move.plan, move.occupants].pop(0)
            after = with_label(move.occupants, move.kind, move.before, move.after)
            insort(free.setdefault((move.plan, after), []), site)
            found.append((self.sites.kinds[move.plan][site][move.kind], move))

        def place(one: tuple[int, _Move]) -> int:
            move = one[1]
            return StepKind.SWITCH if self._plans[move.plan][move.kind].devices else move.step

        return sorted(found, key=place)

    def _key(self, move: _Move, after: State) -> tuple[object, ...]:
        """The order among moves of equal cost; the least comes first.

        A device on which a change was begun is finished first, and the stage with the fewest instances keeps as
        many as possible.
        """
        plan = self._plans[move.plan]
        arrives = move.after in plan[move.kind].goal
        roles = [label.role for sites in after for site in sites for labels in site for label in labels]
        fewest = min(sum(stage in role for role in roles) for stage in _FLOOR)
        return move.step, not arrives, self._left(plan, move.occupants), -fewest, move.plan, move.kind

    def _moves(self, state: State) -> Iterator[tuple[_Move, State, bool]]:
        """Each possible move, what follows from it, and whether something encodes meanwhile.

        A start that has to come in any case comes at once: it takes nothing from what serves.
        """
        roles = Counter(label.role for sites in state for site in sites for labels in site for label in labels)
        covered = frozenset("".join(roles))
        places = [
            (number, occupants, kind)
            for number, sites in enumerate(state)
            for occupants in dict.fromkeys(sites)
            for kind in range(len(occupants))
        ]

        def made(
            place: tuple[int, Occupants, int], step: StepKind, before: Label | None, after: Label | None
        ) -> tuple[_Move, State]:
            number, occupants, kind = place
            changed = list(state[number])
            changed.remove(occupants)
            insort(changed, with_label(occupants, kind, before, after))
            move = _Move(step, number, occupants, kind, before, after)
            return move, (*state[:number], tuple(changed), *state[number + 1 :])

        for place in places:
            number, occupants, kind = place
            if has_room(self._plans[number], occupants, kind):
                for label in missing(self._plans[number][kind].goal, occupants[kind]):
                    yield *made(place, StepKind.START, None, label), "E" in covered
                    return
        for place in places:
            number, occupants, kind = place
            one, labels = self._plans[number][kind], occupants[kind]
            if has_room(self._plans[number], occupants, kind):
                for label in sorted(Counter(one.goal) - Counter(labels)):
                    yield *made(place, StepKind.START, None, label), "E" in covered
            for label in sorted(set(labels)):
                left = frozenset("".join((roles - Counter([label.role])).keys()))
                if (covered - left) & _FLOOR:
                    continue
                for role in one.choices:
                    if role != label.role and (one.width == 1 or set(role) & _FLOOR):
                        yield *made(place, StepKind.SWITCH, label, Label(role, True)), "E" in left
                if len(labels) > len(one.goal):
                    yield *made(place, StepKind.STOP, label, None), "E" in left

    def _estimate(self, state: State) -> _Cost:
        """A lower bound of the cost that is left."""
        lefts = [self._left(plan, site) for plan, sites in zip(self._plans, state, strict=True) for site in sites]
        starts, switches, stops = (sum(each) for each in zip(*lefts, strict=True))
        return _Cost(starts, 0, switches, stops)


def _back(came: dict[State, tuple[State, _Move]], state: State) -> list[_Move]:
    moves = []
    while state in came:
        state, move = came[state]
        moves.append(move)
    return moves[::-1]
