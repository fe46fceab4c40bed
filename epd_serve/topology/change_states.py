"""States of a deployment on the way to another one; states that cannot be told apart count as one.

Instances of one kind are equal but for their labels. Devices that the same processes want are a site, and of sites
that are alike, as 16 GPUs with an instance each, it does not matter either which one a step is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epd_serve.topology.placement import CPU
from epd_serve.types import Role


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
    """

    name: str
    role: Role
    kind: Hashable
    devices: tuple[str, ...] = (CPU,)
    is_current: bool = True


class Label(NamedTuple):
    """All that distinguishes instances of one kind."""

    role: str
    is_current: bool


def label_of(part: Part) -> Label:
    return Label(str(part.role), part.is_current)


#: The instances of each kind of a site, sorted.
Occupants = tuple[tuple[Label, ...], ...]
#: For each site plan its sites' occupants, sorted: which site has which does not matter.
State = tuple[tuple[Occupants, ...], ...]


class Left(NamedTuple):
    """The least numbers of steps that are left."""

    starts: int
    switches: int
    stops: int


class KindPlan(NamedTuple):
    """The plan for one kind of instance on a site.

    Attributes:
        devices: the numbers, within the site, of those that a process of it has to itself; none on a CPU.
        width: number of its devices.
        goal: its instances in the end, sorted.
        choices: roles to which its instances are switched, on the way too.
    """

    devices: frozenset[int]
    width: int
    goal: tuple[Label, ...]
    choices: tuple[str, ...]


#: Of each of the kinds whose processes want the same devices.
SitePlan = tuple[KindPlan, ...]


class Sites:
    """All kinds, by the devices that they want; on a CPU each is a site of its own.

    Attributes:
        plans: each once; sites of the same plan are alike.
        kinds: for each plan, for each of its sites: the numbers of the kinds, in the plan's order.
        occupants: for each plan, for each of its sites: the instances there at the start.
    """

    def __init__(self, running: Sequence[Part], wanted: Sequence[Part], bridge: str) -> None:
        """``bridge``: the role that any instance may have for a while, where others change places."""
        parts = {part.kind: part for part in (*wanted, *running)}
        self._numbers = {kind: number for number, kind in enumerate(parts)}
        devices = [tuple(device for device in part.devices if device != CPU) for part in parts.values()]
        widths = [len(part.devices) for part in parts.values()]
        now, then = self._labels(running), self._labels(wanted)
        found: dict[SitePlan, list[list[int]]] = {}
        for kinds in _together(devices):
            here = {device: number for number, device in enumerate(_distinct(devices[kind] for kind in kinds))}
            plan = tuple(
                KindPlan(
                    devices=frozenset(here[device] for device in devices[kind]),
                    width=widths[kind],
                    goal=then[kind],
                    choices=_choices(now[kind], then[kind], bridge),
                )
                for kind in kinds
            )
            found.setdefault(plan, []).append(kinds)
        self.plans = list(found)
        self.kinds = list(found.values())
        self.occupants = [[tuple(now[kind] for kind in kinds) for kinds in sites] for sites in self.kinds]

    @property
    def start(self) -> State:
        return tuple(tuple(sorted(sites)) for sites in self.occupants)

    @property
    def goal(self) -> State:
        return tuple(
            (tuple(kind.goal for kind in plan),) * len(sites)
            for plan, sites in zip(self.plans, self.kinds, strict=True)
        )

    def number_of(self, kind: Hashable) -> int:
        return self._numbers[kind]

    def _labels(self, parts: Sequence[Part]) -> list[tuple[Label, ...]]:
        labels: list[list[Label]] = [[] for _ in self._numbers]
        for part in parts:
            labels[self._numbers[part.kind]].append(label_of(part))
        return [tuple(sorted(one)) for one in labels]


def has_room(plan: SitePlan, occupants: Occupants, kind: int) -> bool:
    """Whether an instance of a kind can be started."""
    devices = plan[kind].devices
    if not devices:
        return True
    return len(occupants[kind]) < len(plan[kind].goal) and all(
        len(labels) <= len(one.goal) for labels, one in zip(occupants, plan, strict=True) if one.devices & devices
    )


def missing(goal: Sequence[Label], labels: Sequence[Label]) -> list[Label]:
    """The instances to start where all others of the kind have reached the goal; none where they have not."""
    if len(labels) < len(goal) and not Counter(labels) - Counter(goal):
        return sorted(Counter(goal) - Counter(labels))
    return []


def with_label(occupants: Occupants, kind: int, before: Label | None, after: Label | None) -> Occupants:
    """The occupants after one instance of a kind has changed its label; None is an instance that is not there."""
    labels = list(occupants[kind])
    if before is not None:
        labels.remove(before)
    if after is not None:
        labels.append(after)
    return (*occupants[:kind], tuple(sorted(labels)), *occupants[kind + 1 :])


def steps_left(plan: SitePlan, occupants: Occupants) -> Left:
    """The least numbers of steps from these occupants to the plan, were there no other sites."""
    starts = switches = stops = 0
    for one, labels in zip(plan, occupants, strict=True):
        starts += max(0, len(one.goal) - len(labels))
        stops += max(0, len(labels) - len(one.goal))
        switches += _switches(Counter(labels), Counter(one.goal))
    return Left(starts, switches, stops)


def _switches(labels: Counter[Label], goal: Counter[Label]) -> int:
    """The least number of switches: one to another role, two to the same role with new settings."""
    labels, goal = labels - goal, goal - labels
    have, need = labels.total(), goal.total()
    stale = [(count, goal[Label(role, True)]) for (role, current), count in labels.items() if not current]
    in_one = min([have, need, *(have - count + need - same for count, same in stale)])  # by Hall's theorem
    return 2 * min(have, need) - in_one


def _choices(now: Sequence[Label], goal: Sequence[Label], bridge: str) -> tuple[str, ...]:
    roles = {label.role for label in goal} | {bridge}
    if len(roles) == 1 and Label(bridge, False) in now:  # it has to leave that role in order to come back to it
        roles.add("PD" if bridge == "EPD" else "P")
    return tuple(sorted(roles))


def _together(devices: Sequence[Sequence[str]]) -> list[list[int]]:
    """Group kinds that want a device in common, directly or through other kinds."""
    found: list[tuple[set[str], list[int]]] = []
    for kind, own in enumerate(devices):
        wanted, kinds = set(own), [kind]
        for one in [one for one in found if one[0] & wanted]:
            found.remove(one)
            wanted |= one[0]
            kinds += one[1]
        found.append((wanted, sorted(kinds)))
    return [kinds for _, kinds in found]


def _distinct(devices: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(device for some in devices for device in some))
