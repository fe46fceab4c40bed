"""A simulated instance: tower, language model, caches and reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epd_serve.cache.feature_cache import IDLE_FEATURES, FeatureCache
from epd_serve.cost.stages import Link
from epd_serve.protocol.instance_state import InstanceInfo, Load, Report
from epd_serve.sched.schedule import schedule_encodes
from epd_serve.sched.sequence import Sequence
from epd_serve.sim.device import Activity, Clock, SimDevice
from epd_serve.sim.language import LanguageSide
from epd_serve.sim.spec import SimInstanceSpec, find_image_budget
from epd_serve.transfer.grouping import seconds_until_sent, smallest_hidden_group
from epd_serve.types import Stage, StageRate

#: Weight of a new answer in the mean length, as in instance/reports.py.
_GAIN = 0.05
#: Capacity of an encoder's feature cache.
_FEATURE_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class Reservation:
    """A request that waits for blocks of a decode instance, in order of arrival."""

    num_tokens: int
    hashes: list[bytes]
    arrival_s: float
    granted: Callable[[Any], None]


class SimInstance:
    """One instance on its device.

    Args:
        on_prompt, on_end: called with a sequence at its first and last token.
    """

    def __init__(
        self,
        clock: Clock,
        device: SimDevice,
        spec: SimInstanceSpec,
        *,
        on_prompt: Callable[[SimInstance, Sequence], None],
        on_end: Callable[[Sequence], None],
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._on_end = on_end
        self.ready = True
        self.pid = 1
        self.features: FeatureCache[int] = FeatureCache(_FEATURE_BYTES, IDLE_FEATURES)
        self.tower = TowerSide(device, spec, on_idle=self._begin_step)
        self.language: LanguageSide | None = None
        if spec.role.has_language_model:
            self.language = LanguageSide(
                clock,
                device,
                spec,
                has_feature=lambda key: key in self.features,
                is_held=lambda: spec.assists and bool(self.tower.flights),
                on_prompt=lambda sequence: on_prompt(self, sequence),
                on_end=self._ended,
                on_free=self._grant,
            )
        self._waiting: deque[Reservation] = deque()
        self._granting = False
        self.num_expected = 0
        self.received: list[str] = []
        self.is_changed = True
        self._mean_output = 0.0
        #: target → (time when the lane is free, time when the last prompt was computed)
        self._lanes: dict[str, tuple[float, float]] = {}
        self._rates = self._stage_rates()

    # ------------------------------------------------------------------ reports

    def info(self) -> InstanceInfo:
        spec, profile = self.spec, self.spec.profile
        budget = {} if self.language is None else {"max_num_batched_tokens": self.language.budget.max_num_tokens}
        return InstanceInfo(
            name=spec.name,
            role=str(spec.role),
            url="",
            model="model",
            model_path="",
            max_model_len=1 << 30,
            media_fingerprint="",
            device=spec.device,
            dtype=profile.dtype,
            pid=self.pid,
            ready=self.ready,
            load=self.load(),
            assists=spec.assists,
            budgets=dict(budget),
            host_id=spec.host,
            block_size=spec.block_size if self.language is not None else 0,
            kv_token_bytes=profile.kv_token_bytes,
            tokens_per_pixel=1 / profile.pixels_per_token if profile.pixels_per_token else 0.0,
            feature_token_bytes=profile.feature_token_bytes,
        )

    def load(self) -> Load:
        language, tower = self.language, self.tower
        num_encodes, num_pixels = len(tower.flights), tower.num_waiting_pixels
        if language is None:
            return Load(num_waiting_encodes=num_encodes, num_waiting_pixels=num_pixels, rates=self._rates)
        return Load(
            num_waiting_encodes=num_encodes,
            num_waiting_pixels=num_pixels,
            num_running=language.num_running,
            num_waiting=language.num_waiting,
            num_waiting_tokens=language.num_waiting_tokens if self.spec.role.prefills else 0,
            num_expected=self.num_expected,
            num_refused=len(self._waiting),
            free_blocks=language.pool.num_free,
            total_blocks=language.pool.capacity,
            mean_output_tokens=self._mean_output,
            tokens_per_character=0.25,
            rates=self._rates,
        )

    def report(self) -> Report:
        """Return the report to gateways on events since the last one."""
        received, self.received = self.received, []
        made, self.tower.made = self.tower.made, []
        self.is_changed = False
        return Report(load=self.load(), ready=self.ready, received=received, encoded=made)

    def _stage_rates(self) -> dict[str, StageRate]:
        """Return stage rates as fitted from many batches."""
        profile, role = self.spec.profile, self.spec.role
        rates: dict[str, StageRate] = {}
        if role.encodes:
            one, two = profile.encode_s([448**2]), profile.encode_s([448**2] * 2)
            rates[Stage.ENCODE.value] = StageRate(max(2 * one - two, 0.0), (two - one) / 448**2)
        if role.prefills:
            one, two = profile.step_s(512, 1, 0, 512**2), profile.step_s(1024, 1, 0, 1024**2)
            rates[Stage.PREFILL.value] = StageRate(max(2 * one - two, 0.0), (two - one) / 512)
        if role.decodes:
            one, two = profile.step_s(8, 8, 8 * 1024), profile.step_s(16, 16, 16 * 1024)
            rates[Stage.DECODE.value] = StageRate(max(2 * one - two, 0.0), (two - one) / 8)
        return rates

    # ------------------------------------------------------------------ requests

    def receive(self, stage: Stage, request_id: str) -> None:
        """Record a call for the next report."""
        self.received.append(stage.value + request_id)
        self.is_changed = True

    def take_feature(self, key: str, owner: str, nbytes: int) -> None:
        self.features.put(key, nbytes, nbytes, owner, beyond=True)
        if self.language is not None:
            self.language.take_feature(key)

    def reserve(self, reservation: Reservation) -> None:
        self._waiting.append(reservation)
        self.is_changed = True
        self._grant()

    def send_s(self, target: str, link: Link, num_tokens: int, computing_s: float) -> float:
        """Return the seconds until the KV of a prompt computed now has reached another instance.

        Groups of layers overlapped the computation unless earlier transfers delayed them. A recurrent state
        follows the last group. Prompts of one step share their transfers.
        """
        profile, now = self.spec.profile, self._clock.now
        layers, handshake_s = profile.num_layers, link.handshake_s
        layer_s, layer_bytes = computing_s / layers, num_tokens * profile.kv_token_bytes / layers
        send_s, state_s = layer_bytes / link.bytes_per_s, profile.state_bytes / link.bytes_per_s
        free_s, computed_s = self._lanes.get(target, (0.0, -1.0))
        if computed_s == now:
            free_s += layers * send_s + state_s
        else:
            group = layers
            if computing_s > 0:
                group = smallest_hidden_group(layers, layer_s, layer_bytes, handshake_s, link.bytes_per_s)
            begun_s = now - computing_s
            sent_s = seconds_until_sent(layers, group, layer_s, send_s, handshake_s, free_s=free_s - begun_s)
            free_s = begun_s + sent_s + state_s
        self._lanes[target] = free_s, now
        return free_s - now

    def _grant(self) -> None:
        """Grant waiting reservations in order."""
        self.is_changed = True
        if self._granting or self.language is None:
            return
        self._granting = True
        while self._waiting:
            first = self._waiting[0]
            blocks = self.language.reserve(first.num_tokens, first.hashes, first.arrival_s)
            if blocks is None:
                break
            self._waiting.popleft()
            first.granted(blocks)
        self._granting = False

    def _begin_step(self) -> None:
        """Begin a step that waited for encodes."""
        if self.spec.assists and self.language is not None:
            self.language.begin()

    def _ended(self, sequence: Sequence) -> None:
        self.is_changed = True
        length = len(sequence.output_ids)
        self._mean_output += _GAIN * (length - self._mean_output) if self._mean_output else float(length)
        self._on_end(sequence)


@dataclass(slots=True, eq=False)
class _Item:
    key: str
    num_pixels: int
    done: list[Callable[[], None]] = field(default_factory=list)


class TowerSide:
    """The encoder with its queue and feature store. ``on_idle``: called when the queue is empty."""

    def __init__(self, device: SimDevice, spec: SimInstanceSpec, *, on_idle: Callable[[], None]) -> None:
        self._on_idle = on_idle
        self._device = device
        self._spec = spec
        self._budget = find_image_budget(spec)
        self.store: FeatureCache[int] = FeatureCache(_FEATURE_BYTES)
        self._waiting: list[_Item] = []
        self.flights: dict[str, _Item] = {}
        self.is_busy = False
        self.made: list[str] = []
        self.num_encoded = 0

    @property
    def num_waiting_pixels(self) -> int:
        return sum(item.num_pixels for item in self.flights.values())

    def encode(self, key: str, num_pixels: int, done: Callable[[], None]) -> None:
        """Encode a picture unless its feature is stored; then call ``done``."""
        if self.store.acquire(key, "use") is not None:
            self.store.release("use", key)
            done()
            return
        if key in self.flights:
            self.flights[key].done.append(done)
            return
        self.num_encoded += 1
        item = self.flights[key] = _Item(key, num_pixels, [done])
        self.made.append(key)
        self._waiting.append(item)
        self._begin()

    def _begin(self) -> None:
        if self.is_busy or not self._waiting:
            return
        batch = schedule_encodes(self._waiting, self._budget)
        del self._waiting[: len(batch)]
        pixels, profile = [item.num_pixels for item in batch], self._spec.profile
        seconds = profile.encode_s(pixels)
        compute = bandwidth = 1.0
        if profile.kind == "analytic" and len(profile.encode) == 2:
            busy = [(line.seconds(pixels) - profile.encode[0].base_s) / seconds for line in profile.encode]
            compute, bandwidth = profile.compute_share * busy[0], profile.bandwidth_share * busy[1]
        self.is_busy = True
        self._device.start(
            Activity(compute=compute, bandwidth=bandwidth, work_s=seconds, on_end=lambda: self._encoded(batch))
        )

    def _encoded(self, batch: list[_Item]) -> None:
        self.is_busy = False
        profile = self._spec.profile
        for item in batch:
            del self.flights[item.key]
            nbytes = profile.feature_token_bytes * profile.image_tokens(item.num_pixels)
            self.store.put(item.key, nbytes, nbytes, "use", beyond=True)
            self.store.release("use", item.key)
            for done in item.done:
                done()
        self._begin()
        if not self.flights:
            self._on_idle()
