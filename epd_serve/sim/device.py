"""Virtual seconds, and a device with what computes on it: side by side, activities slow each other down."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Protocol

from epd_serve.cost.interference import InterferenceMatrix
from epd_serve.cost.profile import Profile


class Clock:
    """A heap of events. Those of one moment happen in the order in which they were asked for."""

    __slots__ = ("_events", "_numbers", "now", "num_events")

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, run: Callable[[], None]) -> None:
        """``seconds`` in the past mean now."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._numbers), run))

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), run))

    @property
    def has_events(self) -> bool:
        """Whether anything is to come."""
        return bool(self._events)

    def run(self, until: Callable[[], bool]) -> None:
        """Until it is so. Raises RuntimeError where nothing happens any more before that."""
        events = self._events
        while not until():
            if not events:
                raise RuntimeError(f"at {self.now:.3f} s nothing is left to happen")
            self.now, _, run = heapq.heappop(events)
            self.num_events += 1
            run()


@dataclass(slots=True, eq=False)
class Activity:
    """A step or a batch that computes.

    Attributes:
        stage: what it does, for measured interference: "E", "P", "D", "host" (images are prepared) or "talk".
        compute, bandwidth: of the device's peak, the part that it uses when it is alone.
        work_s: what it takes alone; done_s of that is done.
        cores: of a CPU.
        owner: the instance.
    """

    stage: str
    compute: float
    bandwidth: float
    work_s: float
    on_end: Callable[[], None]
    cores: float = 1.0
    owner: str = ""
    done_s: float = 0.0
    rate: float = 1.0
    since_s: float = 0.0
    begun_s: float = 0.0
    version: int = 0


class Sharing(Protocol):
    """The shares of a device that activities get, in order: 1 is what they would have alone."""

    def rates(self, activities: Sequence[Activity]) -> list[float]: ...


class FluidSharing:
    """Resources are divided like fluids: nothing slows down while demands for compute and for bandwidth each fit.

    So a stage that waits for memory runs beside one that computes at little cost (EPD-Serve, section 3.5).
    """

    def rates(self, activities: Sequence[Activity]) -> list[float]:
        compute = sum(one.compute for one in activities)
        bandwidth = sum(one.bandwidth for one in activities)
        return [1 / max(1.0, compute, bandwidth)] * len(activities)


@dataclass(frozen=True, slots=True)
class MeasuredSharing:
    """As pairs of stages were measured side by side; increases of several neighbours add up.

    A CPU has ``cores``; where more are wanted in all, each thread gets an equal part, or ``by_instance`` each
    instance, and none more than it asks for. An instance that takes turns with others on a core is slower by
    ``crowding`` besides; one whose own stages take turns likewise where it decodes, and else by
    ``crowding_within``. Both were measured with all that instances do to each other. ``within``: of two stages in
    one instance, which wait for each other: on a CPU for the lock of Python's interpreter or of the process's
    memory, besides ``increase``; a stage that waits leaves its core to others. On other devices it comes in place
    of ``increase``.
    """

    increase: dict[tuple[str, str], float] = field(default_factory=dict)
    cores: float = float("inf")
    within: dict[tuple[str, str], float] = field(default_factory=dict)
    crowding: float = 0.0
    by_instance: bool = False
    crowding_within: float = 0.0

    @classmethod
    def of(cls, matrix: InterferenceMatrix, cores: float = float("inf")) -> MeasuredSharing:
        names = [one.name for one in matrix.workloads if one.kind == "stage"]
        pairs: dict[tuple[str, str], float] = {}
        for name in names:
            for beside in names:
                try:
                    pairs[name, beside] = matrix.increase_of(name, beside)
                except KeyError:
                    continue
        return cls(pairs, cores)

    @classmethod
    def of_profile(cls, profile: Profile, cores: float = float("inf")) -> MeasuredSharing:
        """Read a profile; what was not measured is taken for what was: E beside P for E beside D."""

        def pairs(known: dict[str, float]) -> dict[tuple[str, str], float]:
            split = ((pair.partition("/"), value) for pair, value in known.items())
            return {(one, beside): value for (one, _, beside), value in split}

        increase = pairs(profile.interference)
        for pair, like in ((("E", "P"), ("E", "D")), (("P", "E"), ("P", "D"))):
            if like in increase:
                increase.setdefault(pair, increase[like])
        by_instance = profile.cores_go_by == "instance"
        return cls(
            increase,
            cores,
            pairs(profile.interference_within),
            profile.crowding,
            by_instance,
            profile.crowding_within if by_instance else profile.crowding,
        )

    def rates(self, activities: Sequence[Activity]) -> list[float]:
        waits: list[float] = []
        longer: list[float] = []
        sharers = [one.owner if self.by_instance else "" for one in activities]
        wanted: dict[str, tuple[float, float, bool]] = {}
        for one, sharer in zip(activities, sharers, strict=True):
            wait = more = 1.0
            for other in activities:
                if other is not one:
                    pair = one.stage, other.stage
                    waits_for = self.within.get(pair, 0.0) if one.owner == other.owner else 0.0
                    alike = waits_for if self.cores == float("inf") else 0.0
                    more += max(self.increase.get(pair, 0.0) - alike, 0.0)
                    wait += waits_for
            waits.append(wait)
            longer.append(more)
            cores, most, decodes = wanted.get(sharer, (0.0, 0.0, False))
            wanted[sharer] = cores + one.cores / wait, max(most, one.cores), decodes or one.stage == "D"
        scarce = self._scarcity(wanted)
        return [
            1 / (wait * max(more, scarce[sharer]))
            for sharer, wait, more in zip(sharers, waits, longer, strict=True)
        ]

    def _scarcity(self, wanted: dict[str, tuple[float, float, bool]]) -> dict[str, float]:
        """Return by how much each is longer; ``wanted``: cores in all, of one activity at most, if it decodes."""
        scarce: dict[str, float] = {}
        left = self.cores
        for number, (name, (cores, most, decodes)) in enumerate(sorted(wanted.items(), key=itemgetter(1))):
            part = left / (len(wanted) - number)
            crowding = self.crowding if decodes or part < most else self.crowding_within
            scarce[name] = cores / part * (1 + crowding) if cores > part else 1.0
            left -= min(cores, part)
        return scarce


class SimDevice:
    """One device, or one machine's CPU."""

    def __init__(self, clock: Clock, sharing: Sharing) -> None:
        self._clock = clock
        self._sharing = sharing
        self._active: list[Activity] = []
        self.busy_s = 0.0
        self._busy_since = 0.0

    def start(self, activity: Activity) -> None:
        """``on_end`` is called when it is done."""
        if not self._active:
            self._busy_since = self._clock.now
        self._active.append(activity)
        activity.since_s = activity.begun_s = self._clock.now
        self._share()

    def stop(self, activity: Activity) -> None:
        """It is given up: ``on_end`` is not called any more. Idempotent."""
        if activity in self._active:
            self._remove(activity)
            self._share()

    def progress(self, activity: Activity) -> float:
        """Alone-seconds of it that are done by now."""
        done = activity.done_s + (self._clock.now - activity.since_s) * activity.rate
        return min(done, activity.work_s)

    def shorten(self, activity: Activity, work_s: float) -> None:
        """It ends after so many of its alone-seconds."""
        activity.done_s = self.progress(activity)
        activity.since_s = self._clock.now
        activity.work_s = max(work_s, activity.done_s)
        self._schedule(activity)

    def _remove(self, activity: Activity) -> None:
        self._active.remove(activity)
        activity.version += 1
        if not self._active:
            self.busy_s += self._clock.now - self._busy_since

    def _share(self) -> None:
        active = self._active
        if len(active) == 1:
            one = active[0]
            if one.rate != 1.0 or not one.version:
                self._rerate(one, 1.0)
            return
        for one, rate in zip(active, self._sharing.rates(active), strict=True):
            if rate != one.rate or not one.version:
                self._rerate(one, rate)

    def _rerate(self, activity: Activity, rate: float) -> None:
        activity.done_s = self.progress(activity)
        activity.since_s = self._clock.now
        activity.rate = rate
        self._schedule(activity)

    def _schedule(self, activity: Activity) -> None:
        activity.version += 1
        version = activity.version

        def end() -> None:
            if activity.version == version:
                self._remove(activity)
                self._share()
                activity.on_end()

        self._clock.after((activity.work_s - activity.done_s) / activity.rate, end)
