"""The tower of a simulated instance: items of several requests in one batch, equal items encoded once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from epd_serve.cache.feature_cache import FeatureCache
from epd_serve.sched.encode import schedule_encodes
from epd_serve.sim.clock import Clock
from epd_serve.sim.device import Activity, MeasuredSharing, SimDevice
from epd_serve.sim.spec import SimInstanceSpec, find_image_budget

Encoded = Callable[[bool], None]


@dataclass(slots=True, eq=False)
class _Item:
    key: str
    num_pixels: int
    done: list[Encoded] = field(default_factory=list)


class TowerSide:
    """``may_start``: asked before each batch; ``on_idle``: told behind each one."""

    def __init__(
        self,
        clock: Clock,
        device: SimDevice,
        spec: SimInstanceSpec,
        *,
        may_start: Callable[[], bool] = lambda: True,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._device = device
        self._spec = spec
        self._may_start = may_start
        self._on_idle = on_idle
        self._budget = find_image_budget(spec)
        self.store: FeatureCache[int] = FeatureCache(spec.feature_bytes)
        self._waiting: list[_Item] = []
        self._flights: dict[str, _Item] = {}
        # a CPU prepares images itself, beside what it computes; of other devices the host does, with cores enough
        self._host = device if spec.on_cpu else SimDevice(clock, MeasuredSharing())
        # as many at a time as compute, each one thread (instance/request_processor.py)
        self._num_preparers = max(int(spec.cores), 1) if spec.on_cpu else float("inf")
        self._unprepared: deque[_Item] = deque()
        self._preparing: dict[str, Activity] = {}
        self._activity: Activity | None = None
        self.made: list[str] = []
        self.num_encoded = self.num_hits = 0

    @property
    def is_busy(self) -> bool:
        return self._activity is not None

    @property
    def num_waiting_pixels(self) -> int:
        return sum(item.num_pixels for item in self._flights.values())

    @property
    def num_waiting(self) -> int:
        return len(self._flights)

    def encode(self, key: str, num_pixels: int, done: Encoded) -> None:
        """``done`` is told whether the feature was there already."""
        if self.store.acquire(key, "use") is not None:
            self.store.release("use", key)
            self.num_hits += 1
            done(True)
            return
        flight = self._flights.get(key)
        if flight is not None:
            self.num_hits += 1
            flight.done.append(done)
            return
        self.num_encoded += 1
        item = self._flights[key] = _Item(key, num_pixels, [done])
        self.made.append(key)
        if not self._spec.profile.prepare_s(num_pixels):
            self._prepared(item)
        elif len(self._preparing) < self._num_preparers:
            self._prepare(item)
        else:
            self._unprepared.append(item)

    def _prepare(self, item: _Item) -> None:
        seconds = self._spec.profile.prepare_s(item.num_pixels)
        host = Activity("host", 0.0, 0.0, seconds, partial(self._prepared, item), 1.0, self._spec.name)
        self._preparing[item.key] = host
        self._host.start(host)

    def _prepared(self, item: _Item) -> None:
        if self._preparing.pop(item.key, None) is not None and self._unprepared:
            self._prepare(self._unprepared.popleft())
        self._waiting.append(item)
        self.kick()

    def kick(self) -> None:
        if self._activity is not None or not self._waiting or not self._may_start():
            return
        batch = schedule_encodes(self._waiting, self._budget)
        del self._waiting[: len(batch)]
        pixels, profile = [item.num_pixels for item in batch], self._spec.profile
        seconds = profile.encode_s(pixels)
        compute = bandwidth = 1.0
        if profile.kind == "analytic" and len(profile.encode) == 2:
            busy = [(line.seconds(pixels) - profile.encode[0].base_s) / seconds for line in profile.encode]
            compute, bandwidth = profile.compute_share * busy[0], profile.bandwidth_share * busy[1]
        self._activity = Activity(
            "E", compute, bandwidth, seconds, lambda: self._encoded(batch), self._spec.cores, self._spec.name
        )
        self._device.start(self._activity)

    def drop_all(self) -> None:
        """The process has died."""
        if self._activity is not None:
            self._device.stop(self._activity)
        self._activity = None
        for preparing in self._preparing.values():
            self._host.stop(preparing)
        self._preparing.clear()
        self._unprepared.clear()
        self._waiting.clear()
        self._flights.clear()
        self.made.clear()
        self.store = FeatureCache(self._spec.feature_bytes)

    def _encoded(self, batch: list[_Item]) -> None:
        self._activity = None
        token_bytes, profile = self._spec.profile.feature_token_bytes, self._spec.profile
        for item in batch:
            del self._flights[item.key]
            nbytes = token_bytes * profile.image_tokens(item.num_pixels)
            self.store.put(item.key, nbytes, nbytes, "use", beyond=True)
            self.store.release("use", item.key)
            for done in item.done:
                done(False)
        self._on_idle()
        self.kick()
