"""A simulated instance: real queues, schedule, block pool and feature cache, with modelled times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from device.datasheets import has_stream_priorities
from epd_serve.cache.block_pool import BlockPool
from epd_serve.cache.feature_cache import IDLE_FEATURES, FeatureCache
from epd_serve.cost.stages import Link
from epd_serve.engine.dual_stream import LANGUAGE_PRIORITY
from epd_serve.protocol.instance_state import InstanceInfo, Load, Report
from epd_serve.sched.queues import Order, Queues
from epd_serve.sched.schedule import ScheduleOutput, schedule_encodes
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_cost import StepPace, StepWork
from epd_serve.sim.device import Activity, Clock, SimDevice
from epd_serve.sim.spec import SimInstanceSpec, find_image_budget, size_steps_of
from epd_serve.transfer.grouping import seconds_until_sent, smallest_hidden_group
from epd_serve.types import Stage, StageRate

#: Weight of a new answer in the mean length, as in instance/reports.py.
_GAIN = 0.05
#: Capacity of a feature cache.
_FEATURE_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class Reservation:
    """A request that waits for blocks of a decode instance, in order of arrival; ``granted`` receives them."""

    num_tokens: int
    hashes: list[bytes]
    arrival_s: float
    granted: Callable[[Any], None]


@dataclass(slots=True, eq=False)
class _Item:
    """An image to encode; each of ``done`` is called when its feature is stored."""

    key: str
    num_pixels: int
    done: list[Callable[[], None]]


class SimInstance:
    """One instance on its device.

    An instance that runs ahead plans a step when the previous one begins; arrivals in between join a later step.

    Args:
        on_prompt, on_end: called with a sequence at its first token, and when it is complete and its blocks free.

    Attributes:
        store: features that its tower made.
        features: features that its prompts use.
        flights: images that wait or are being encoded.
        is_encoding, is_stepping: whether the tower or the language model is at work.
        num_expected: requests that P will hand over.
        num_unsubmitted_tokens: tokens of prompts that wait for a feature or a reservation.
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
        self._device = device
        self._process = id(self), 0, 0
        self._priority = LANGUAGE_PRIORITY if has_stream_priorities(spec.profile.device) else 0
        self._on_prompt = on_prompt
        self._on_end = on_end
        self.ready = True
        self.pid = 1
        self.store: FeatureCache[int] = FeatureCache(_FEATURE_BYTES)
        self._image_budget = find_image_budget(spec)
        self._unencoded: list[_Item] = []
        self.flights: dict[str, _Item] = {}
        self.is_encoding = False
        self.num_encoded = 0
        self.features: FeatureCache[int] = FeatureCache(_FEATURE_BYTES, IDLE_FEATURES)
        self.pool = BlockPool(spec.num_blocks, spec.block_size, state_blocks=spec.state_blocks)
        self._budget, cost = size_steps_of(spec)
        order = Order(spec.batching.order, self.pool, self._budget, cost, spec.batching.ttft_s)
        self.queues = Queues(self.pool, _NoMemory(), self._budget, order)
        self.queues.features = self
        self._unseen: list[Sequence] = []  # arrivals since the next step was planned
        self._unseen_features: set[str] = set()
        self._awaited: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.is_stepping = False
        self.num_steps = 0
        self._reservations: deque[Reservation] = deque()
        self._granting = False
        self.num_expected = 0
        self.num_unsubmitted_tokens = 0
        self._received: list[str] = []
        self._encoded_keys: list[str] = []
        self.is_changed = True
        self._mean_output = 0.0
        #: target → (time when the lane is free, time when the last prompt was computed)
        self._lanes: dict[str, tuple[float, float]] = {}
        self._rates = _stage_rates(spec)

    # ------------------------------------------------------------------ reports

    def info(self) -> InstanceInfo:
        spec, profile = self.spec, self.spec.profile
        has_language = spec.role.has_language_model
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
            budgets={"max_num_batched_tokens": self._budget.max_num_tokens} if has_language else {},
            host_id=spec.host,
            block_size=spec.block_size if has_language else 0,
            kv_token_bytes=profile.kv_token_bytes,
            tokens_per_pixel=1 / profile.pixels_per_token if profile.pixels_per_token else 0.0,
            feature_token_bytes=profile.feature_token_bytes,
        )

    def load(self) -> Load:
        role = self.spec.role
        num_pixels = sum(item.num_pixels for item in self.flights.values())
        if not role.has_language_model:
            return Load(num_waiting_encodes=len(self.flights), num_waiting_pixels=num_pixels, rates=self._rates)
        new = [one for one in self._unseen if one.state is SequenceState.WAITING]
        num_tokens = self.num_unsubmitted_tokens + self.queues.num_waiting_tokens
        num_tokens += sum(one.num_uncomputed for one in new)
        return Load(
            num_waiting_encodes=len(self.flights),
            num_waiting_pixels=num_pixels,
            num_running=self.queues.num_running + len(self._unseen) - len(new),
            num_waiting=self.queues.num_waiting + len(new),
            num_waiting_tokens=num_tokens if role.prefills else 0,
            num_expected=self.num_expected,
            num_refused=len(self._reservations),
            free_blocks=self.pool.num_free,
            total_blocks=self.pool.capacity,
            mean_output_tokens=self._mean_output,
            tokens_per_character=0.25,
            rates=self._rates,
        )

    def report(self) -> Report:
        """Return the report to the gateway on events since the last one."""
        received, self._received = self._received, []
        encoded, self._encoded_keys = self._encoded_keys, []
        self.is_changed = False
        return Report(load=self.load(), ready=self.ready, received=received, encoded=encoded)

    def receive(self, stage: Stage, request_id: str) -> None:
        """Record a call for the next report."""
        self._received.append(stage.value + request_id)
        self.is_changed = True

    # ------------------------------------------------------------------ tower

    def encode(self, key: str, num_pixels: int, done: Callable[[], None]) -> None:
        """Encode a picture unless its feature is stored; then call ``done``."""
        if self.store.acquire(key, "use") is not None:
            self.store.release("use", key)
            done()
        elif key in self.flights:
            self.flights[key].done.append(done)
        else:
            self.num_encoded += 1
            item = self.flights[key] = _Item(key, num_pixels, [done])
            self._encoded_keys.append(key)
            self._unencoded.append(item)
            self._begin_encode()

    def _begin_encode(self) -> None:
        if self.is_encoding or not self._unencoded:
            return
        batch = schedule_encodes(self._unencoded, self._image_budget)
        del self._unencoded[: len(batch)]
        seconds, demand = self.spec.profile.encode_demand([item.num_pixels for item in batch])
        self.is_encoding = True
        self._device.start(
            Activity(
                process=self._process,
                left_s=seconds,
                demand=demand,
                on_end=lambda: self._end_encode(batch),
            )
        )

    def _end_encode(self, batch: list[_Item]) -> None:
        self.is_encoding = False
        profile = self.spec.profile
        for item in batch:
            del self.flights[item.key]
            nbytes = profile.feature_token_bytes * profile.image_tokens(item.num_pixels)
            self.store.put(item.key, nbytes, nbytes, "use", beyond=True)
            self.store.release("use", item.key)
            for done in item.done:
                done()
        self._begin_encode()

    # ------------------------------------------------------------------ requests

    def await_item(self, sequence: Sequence, then: Callable[[], None]) -> None:
        """Call ``then`` once the feature that a prompt's first step needs is here."""
        item = self.queues.first_item(sequence)
        if item is None or item.mm_hash in self.features:
            then()
        else:
            self._awaited[item.mm_hash].append(then)

    def take_feature(self, key: str, owner: str, nbytes: int) -> None:
        self.features.put(key, nbytes, nbytes, owner, beyond=True)
        for then in self._awaited.pop(key, ()):
            then()
        if self._has_work:
            if self.is_stepping and self.spec.runs_ahead:
                self._unseen_features.add(key)
            self.begin_step()

    def has(self, mm_hash: str) -> bool:
        return mm_hash not in self._unseen_features and mm_hash in self.features

    def starved(self, mm_hash: str) -> None:
        """Do nothing: every feature comes."""

    def submit(self, sequence: Sequence) -> None:
        self._unseen.append(sequence)
        if not self.is_stepping or not self.spec.runs_ahead:
            self._see()
        self.begin_step()

    def reserve(self, reservation: Reservation) -> None:
        self._reservations.append(reservation)
        self._grant()

    def resume(self, sequence: Sequence, blocks: Any) -> None:
        """Decode a sequence whose prompt's KV is in ``blocks``; its first token is known."""
        self.num_expected -= 1
        self.is_changed = True
        self.queues.forget_reservation(blocks)
        sequence.blocks, sequence.forks, sequence.states = blocks.root, blocks.forks, blocks.states
        sequence.num_computed = sequence.num_tokens
        sequence.move_to(SequenceState.RUNNING)
        self.queues.tables.register(sequence)
        sequence.output_ids.append(0)
        if len(sequence.output_ids) < sequence.max_tokens:
            self.submit(sequence)
            return
        self._retire(sequence)
        self._end(sequence)
        self.begin_step()

    def release_sent(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence whose KV was transferred."""
        self._retire(sequence)
        self._grant()
        self.begin_step()

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
        if self._granting:
            return
        self._granting = True
        while self._reservations:
            first = self._reservations[0]
            blocks = self.queues.reserve(first.num_tokens, 1, first.hashes, first.arrival_s)
            self.queues.stop_reserving()
            if blocks is None:
                break
            self._reservations.popleft()
            first.granted(blocks)
        self._granting = False

    # ------------------------------------------------------------------ steps

    @property
    def _has_work(self) -> bool:
        return bool(self._unseen or self.queues.num_running or self.queues.num_waiting)

    def _see(self) -> None:
        for sequence in self._unseen:
            if sequence.state is SequenceState.RUNNING:
                self.queues.run(sequence)
            else:
                self.queues.submit(sequence)
        self._unseen = []
        self._unseen_features.clear()

    def begin_step(self) -> None:
        """Begin a step if none is running and there is work."""
        if self.is_stepping or not self._has_work:
            return
        output = self.queues.plan(self._clock.now)
        if not output and (self._unseen or self._unseen_features):
            self._see()
            output = self.queues.plan(self._clock.now)
        if output.admitted:
            self._grant()  # a queue place is free
        if not output:
            return
        self._see()
        self.is_stepping = True
        work = StepWork.of(
            [sequence.num_tokens for sequence in output.decodes],
            [(sequence.num_computed, count) for sequence, count in output.prefills],
        )
        seconds, demand = self.spec.profile.step_demand(
            work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs
        )
        begun_s = self._clock.now
        self._device.start(
            Activity(
                process=self._process,
                left_s=seconds,
                demand=demand,
                priority=self._priority,
                on_end=lambda: self._end_step(work, output, begun_s),
            )
        )

    def _end_step(self, work: StepWork, output: ScheduleOutput, begun_s: float) -> None:
        self.is_stepping = False
        self.num_steps += 1
        for sequence, count in output.prefills:
            sequence.num_computed += count
            if sequence.blocks:
                self.queues.tables.register(sequence)
        for sequence in output.decodes:
            sequence.output_ids.append(0)
            sequence.num_computed += 1
            if len(sequence.output_ids) >= sequence.max_tokens:
                self._finish(sequence)
        for sequence, _ in output.prefills:
            if not sequence.num_uncomputed:
                self._end_prompt(sequence)
        pace = self._budget.pace  # it learns as in an instance (Batching.stepped)
        if isinstance(pace, StepPace) and (output.prefills or not self.spec.role.prefills):
            pace.observe(work, self._clock.now - begun_s)
        self.begin_step()

    def _end_prompt(self, sequence: Sequence) -> None:
        if sequence.hand_off:
            self.queues.stop(sequence)
            sequence.move_to(SequenceState.TRANSFERRING)
            self._on_prompt(self, sequence)
            return
        was_preempted = bool(sequence.output_ids)
        sequence.output_ids.append(0)
        if not was_preempted:
            self._on_prompt(self, sequence)
        if len(sequence.output_ids) >= sequence.max_tokens:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.queues.stop(sequence)
        self._retire(sequence)
        self._grant()
        self._end(sequence)

    def _retire(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.FINISHED)
        self.queues.tables.release(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.is_changed = True
        length = len(sequence.output_ids)
        self._mean_output += _GAIN * (length - self._mean_output) if self._mean_output else float(length)
        self._on_end(sequence)


class _NoMemory:
    """KV memory without contents."""

    def copy_block(self, source: int, target: int) -> None:
        pass

    def save(self, blocks: Any) -> int:
        return len(blocks)

    def restore(self, saved: Any, first: int, blocks: Any) -> None:
        pass


def _stage_rates(spec: SimInstanceSpec) -> dict[str, StageRate]:
    """Return stage rates as fitted from many batches."""
    profile, role = spec.profile, spec.role
    points: dict[Stage, tuple[float, float, int]] = {}  # seconds of an amount, of twice the amount, the amount
    if role.encodes:
        points[Stage.ENCODE] = profile.encode_s([448**2]), profile.encode_s([448**2] * 2), 448**2
    if role.prefills:
        points[Stage.PREFILL] = profile.step_s(512, 1, 0, 512**2), profile.step_s(1024, 1, 0, 1024**2), 512
    if role.decodes:
        points[Stage.DECODE] = profile.step_s(8, 8, 8 * 1024), profile.step_s(16, 16, 16 * 1024), 8
    return {
        stage.value: StageRate(max(2 * one - two, 0.0), (two - one) / amount)
        for stage, (one, two, amount) in points.items()
    }
