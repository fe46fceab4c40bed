"""Decide on role switches (EPD, section 3.2.4), without I/O or a clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, sqrt

from epd_serve.autoscale.instance_load import InstanceLoad
from epd_serve.autoscale.pressure import Limits, Sample, StageLoad, capacities, load_of, sample
from epd_serve.config.sections import ElasticConfig
from epd_serve.types import Role, Stage

_NAMES = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}
#: A stage must be late for this many intervals; a single late sample is chance.
HOLD_INTERVALS = 3
#: Intervals over which demand is averaged, so that 1 request/s gives several arrivals per stage.
WINDOW_INTERVALS = 15
#: Fraction by which a switch must lower the predicted pressure, about the error of a prediction.
HYSTERESIS = 0.1
#: Time for an instance to become empty, about that of a long answer; otherwise it keeps its role.
DEADLINE_S = 30.0
#: For this long, a layout left because of its pressure is not restored at a lower pressure.
_FORGET_S = 300.0
_FEWEST_SAMPLES = 3
#: A stage may give up an instance if its pressure then stays below this.
_CALM = 0.5
#: A stage predicted to exceed this pressure is treated as if it already had it.
_SOON_LATE = 1.1

_At = tuple[float, dict[Stage, Sample]]
#: Roles with their numbers of serving instances.
Layout = frozenset[tuple[str, int]]


class Kind(StrEnum):
    """The kind of a decision; ``UNDECIDED`` if none could be made."""

    SWITCH = "switch"
    STARTING = "starting"
    CALM = "calm"
    WATCHING = "watching"
    COOLDOWN = "cooldown"
    SWITCHING = "switching"
    NOTHING_HELPS = "nothing helps"
    FAILED = "failed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Switch ``instance`` to ``role``."""

    instance: str
    role: Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The controller's decision at one moment.

    Attributes:
        reason: explanation for people.
        pressures: measured pressure of each stage; 1 just keeps the SLO.
    """

    at_s: float
    kind: Kind
    reason: str
    order: Order | None = None
    pressures: Mapping[Stage, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Move:
    instance: InstanceLoad
    role: Role
    before: float
    after: float
    pressures: dict[Stage, float]


class Controller:
    """Makes a decision from the state of all instances, about every second.

    If a stage misses the SLO for :data:`HOLD_INTERVALS`, the controller orders the switch with the lowest
    predicted total pressure, provided that it improves by :data:`HYSTERESIS`. Each stage of ``needed`` keeps a
    serving instance. An order starts a ``cooldown_s``. A layout left because of its pressure is restored only at
    a higher one, so that switching ends under constant load. Nothing is ordered until every stage has served once,
    because instances start one by one.

    Args:
        needed: stages that must always keep an instance.
        rebuild_s: time for building the new stages, beyond :data:`DEADLINE_S`.
    """

    def __init__(
        self,
        options: ElasticConfig,
        limits: Limits,
        *,
        needed: Collection[Stage] = tuple(Stage),
        rebuild_s: float = 0.0,
    ) -> None:
        self._deadline_s = DEADLINE_S + rebuild_s
        self._hold_s = HOLD_INTERVALS * options.interval_s
        self._window_s = WINDOW_INTERVALS * options.interval_s
        self.options = options
        self.limits = limits
        self._needed = frozenset(needed)
        self._stages = [stage for stage in Stage if stage in self._needed]
        self._is_starting = True
        self._soon_s: float | None = None
        self._samples: deque[_At] = deque()
        self._serving: frozenset[tuple[str, Role]] = frozenset()
        self._since_s = self._ordered_s = -inf
        self._order: Order | None = None  # until it takes effect, or its deadline
        self._from: Role | None = None
        self._roles: dict[str, Role] = {}
        self._sent: dict[str, Mapping[Stage, float]] = {}
        self._layout: Layout = frozenset()  # before the last order
        self._left: dict[Layout, tuple[float, float]] = {}
        self._refused: set[tuple[str, Role]] = set()

    def refused(self, order: Order) -> None:
        """Record an order that can never succeed; it is not repeated while the instance exists."""
        self._refused.add((order.instance, order.role))
        self.failed(order)

    def failed(self, order: Order) -> None:
        """Record an order that failed; it may be repeated."""
        if order != self._order:
            return  # given up before; another order may be active
        self._order = None
        self._left.pop(self._layout, None)

    def decide(self, now_s: float, instances: Sequence[InstanceLoad]) -> Decision:
        """Decide on the state at ``now_s``, which never decreases."""
        if self._is_starting:
            served = {stage for one in instances if one.is_serving for stage in one.role.stages}
            if missing := [_NAMES[stage] for stage in self._stages if stage not in served]:
                reason = f"no instance has served {' and '.join(missing)} yet"
                return Decision(at_s=now_s, kind=Kind.STARTING, reason=reason)
        self._is_starting = False
        loads, span_s = self._observe(now_s, instances)
        pressures = {stage: load.pressure for stage, load in loads.items()}
        kind, reason, order = self._judge(now_s, instances, loads, span_s)
        return Decision(at_s=now_s, kind=kind, reason=reason, order=order, pressures=pressures)

    # ------------------------------------------------------------------ parts

    def _observe(self, now_s: float, instances: Sequence[InstanceLoad]) -> tuple[dict[Stage, StageLoad], float]:
        """Take a sample; return the load of each stage and the seconds that it covers (0: too few samples)."""
        roles = {one.name: one.role for one in instances}
        own = (self._order.instance, self._order.role) if self._order is not None else None
        if any(self._roles.get(name, role) != role and (name, role) != own for name, role in roles.items()):
            self._ordered_s = now_s  # an operator switched an instance
        self._roles = roles
        self._refused = {(name, role) for name, role in self._refused if name in roles}
        serving = frozenset((one.name, one.role) for one in instances if one.is_serving)
        if serving != self._serving:
            self._serving, self._since_s = serving, now_s
        before, self._sent = self._sent, {one.name: one.sent for one in instances}
        samples: dict[Stage, Sample] = {}
        for stage in self._stages:
            sent = sum(
                max(every.get(stage, 0.0) - before[name].get(stage, 0.0), 0.0)
                for name, every in self._sent.items()
                if name in before
            )
            samples[stage] = sample(stage, instances, sent)
        self._samples.append((now_s, samples))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        steady = [one for one in self._samples if one[0] >= self._since_s]
        first = len(steady) - 1  # becomes the last sample before the hold time
        while first > 0 and (steady[first][0] > now_s - self._hold_s or len(steady) - first < _FEWEST_SAMPLES):
            first -= 1
        num_recent = len(steady) - first
        loads = {
            stage: load_of(
                stage,
                [(at_s, every[stage]) for at_s, every in steady],
                [(at_s, every[stage]) for at_s, every in self._samples],
                self.limits,
                num_recent=num_recent,
                ahead_s=self.options.cooldown_s,
            )
            for stage in self._stages
        }
        return loads, now_s - steady[first][0] if num_recent >= _FEWEST_SAMPLES else 0.0

    def _judge(
        self, now_s: float, instances: Sequence[InstanceLoad], loads: Mapping[Stage, StageLoad], span_s: float
    ) -> tuple[Kind, str, Order | None]:
        """Return the kind, reason and order of the decision; the loads are those of ``span_s`` seconds."""
        pressures = {stage: load.pressure for stage, load in loads.items()}
        stage = max(pressures, key=lambda one: pressures[one])
        worst = pressures[stage]
        foreseen = self._foreseen(now_s, loads)
        if worst <= 1 and foreseen is not None:
            stage, worst = foreseen, _SOON_LATE
        if (pending := self._pending(now_s, instances)) is not None:
            return *pending, None
        if worst <= 1:
            return Kind.CALM, f"every stage keeps the SLO; {_describe(pressures)}", None
        late = f"{_NAMES[stage]} is at {pressures[stage]:.1f} times the SLO's limit"
        if pressures[stage] <= 1:
            late += f" and will reach {loads[stage].coming:.1f} times"
        if span_s < self._hold_s:
            return Kind.WATCHING, f"{late}, for {span_s:.1f} of {self._hold_s:g} s", None
        if (rest_s := self._ordered_s + self.options.cooldown_s - now_s) > 0:
            return Kind.COOLDOWN, f"{late}; the next switch may follow in {rest_s:.1f} s", None
        here = [one for one in instances if one.is_serving]
        move, why_not = self._best(now_s, here, loads, worst)
        if move is None:
            return Kind.NOTHING_HELPS, f"{late}; {why_not}", None
        order = Order(instance=move.instance.name, role=move.role)
        self._ordered_s = self._since_s = now_s
        self._layout = _layout([one.role for one in here])
        self._left[self._layout] = (now_s, worst)
        self._order, self._from = order, move.instance.role
        reason = (
            f"{late}: {order.instance} switches from {move.instance.role} to {order.role}; the predicted total "
            f"pressure falls from {move.before:.2f} to {move.after:.2f} ({_describe(move.pressures)})"
        )
        return Kind.SWITCH, reason, order

    def _foreseen(self, now_s: float, loads: Mapping[Stage, StageLoad]) -> Stage | None:
        """Return the stage whose growing batches have been heading beyond the SLO for the hold time, if any."""
        soon = next((stage for stage, load in loads.items() if load.coming > _SOON_LATE), None)
        if soon is None:
            self._soon_s = None
        elif self._soon_s is None:
            self._soon_s = now_s
        is_sure = self._soon_s is not None and now_s - self._soon_s >= self._hold_s
        return soon if is_sure else None

    def _pending(self, now_s: float, instances: Sequence[InstanceLoad]) -> tuple[Kind, str] | None:
        """Return the kind and reason while the last order is active or has just failed; None after its end."""
        order = self._order
        if order is None:
            return None
        seen = next((one for one in instances if one.name == order.instance), None)
        if seen is not None and seen.is_serving and seen.role.stages == order.role.stages:
            self._order = None
            return None
        if seen is not None and now_s < self._ordered_s + self._deadline_s:
            return Kind.SWITCHING, f"{order.instance} is switching from {self._from} to {order.role}"
        self.failed(order)
        cause = "has left" if seen is None else f"does not serve {order.role} after {self._deadline_s:g} s"
        return Kind.FAILED, f"the switch failed: {order.instance} {cause}"

    def _best(
        self, now_s: float, here: Sequence[InstanceLoad], loads: Mapping[Stage, StageLoad], worst: float
    ) -> tuple[_Move | None, str]:
        """Return the best switch, or None and the reason."""
        ahead_s, roles = self.options.cooldown_s, [one.role for one in here]
        before, expected = _predict(roles, loads, ahead_s)
        late = [stage for stage, load in loads.items() if load.coming > _SOON_LATE or load.pressure > 1]
        best: _Move | None = None
        is_held = is_back = False
        for role in map(Role.parse, ("E", "P", "D")):
            donors: dict[Role, InstanceLoad] = {}
            for one in here:  # of each role, the instance with the least work
                if one.role == role or (one.name, role) in self._refused:
                    continue
                if one.role not in donors or _work_s(one) < _work_s(donors[one.role]):
                    donors[one.role] = one
            for donor in donors.values():
                others = [one.role for one in here if one is not donor]
                given = donor.role.stages & self._needed
                if not all(any(stage in one.stages for one in others) for stage in given):
                    is_held = True  # nothing would serve a stage during the switch
                    continue
                after, pressures = _predict([*others, role], loads, ahead_s)
                helped = [stage for stage in late if pressures[stage] < expected[stage]]
                if after > (1 - HYSTERESIS) * before or not helped:
                    continue
                most = max(1.0, *(expected[stage] for stage in helped))
                if any(_is_overloaded(stage, pressures, expected, most) for stage in given):
                    continue
                left_s, left_worst = self._left.get(_layout([*others, role]), (-inf, 0.0))
                if now_s - left_s <= _FORGET_S and worst <= left_worst * (1 + HYSTERESIS):
                    is_back = True
                    continue
                if best is None or after < best.after:
                    best = _Move(donor, role, before, after, pressures)
        if best is not None:
            return best, ""
        if is_back:
            return None, "the best switch would restore a layout left because of its pressure"
        if is_held:
            return None, "every helpful switch would leave a stage without an instance"
        return None, f"no switch is predicted to gain {HYSTERESIS:.0%}"


def _predict(
    roles: Sequence[Role], loads: Mapping[Stage, StageLoad], ahead_s: float
) -> tuple[float, dict[Stage, float]]:
    """Return the predicted total pressure (root of squares) and that of each stage."""
    given = capacities(roles, loads)
    pressures = {stage: load.predicted(given[stage], ahead_s) for stage, load in loads.items()}
    return sqrt(sum(one * one for one in pressures.values())), pressures


def _is_overloaded(
    stage: Stage, pressures: Mapping[Stage, float], expected: Mapping[Stage, float], most: float
) -> bool:
    """Return whether a switch overloads the stage that gives up an instance.

    ``most`` is the highest expected pressure of the stages that it helps. Decode degrades gradually; an overloaded
    encode or prefill stage has endless queues, which affect all requests.
    """
    if stage is not Stage.DECODE and expected[stage] <= 1:
        return pressures[stage] > _CALM
    return pressures[stage] > most


def _layout(roles: Sequence[Role]) -> Layout:
    return frozenset(Counter(str(role) for role in roles).items())


def _work_s(one: InstanceLoad) -> float:
    """Estimate the seconds of work that an instance must finish before a switch."""
    decoding = one.num_decoding * one.step.seconds(one.num_decoding) if one.num_decoding else 0.0
    return sum(one.queue_s.values()) + decoding


def _describe(pressures: Mapping[Stage, float]) -> str:
    return ", ".join(f"{_NAMES[stage]} {value:.2f}" for stage, value in pressures.items())
