"""The language model of a simulated instance: real queues, schedule and block pool, with modelled step times.

An instance that runs ahead plans a step when the previous one begins; arrivals in between join a later step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epd_serve.cache.block_pool import BlockPool
from epd_serve.sched.queues import Order, Queues
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_cost import StepPace, StepWork
from epd_serve.sim.device import Activity, Clock, SimDevice
from epd_serve.sim.spec import SimInstanceSpec, size_steps_of


class NoMemory:
    """KV memory without contents."""

    def copy_block(self, source: int, target: int) -> None:
        pass

    def save(self, blocks: Any) -> int:
        return len(blocks)

    def restore(self, saved: Any, first: int, blocks: Any) -> None:
        pass


class LanguageSide:
    """One step loop.

    Args:
        has_feature: whether the feature of a media item is available.
        is_held: whether steps must wait for encodes.
        on_prompt: called with a sequence at its first token.
        on_end: called with a complete sequence whose blocks are free.
        on_free: called when blocks or a queue place became free.
    """

    def __init__(
        self,
        clock: Clock,
        device: SimDevice,
        spec: SimInstanceSpec,
        *,
        has_feature: Callable[[str], bool],
        is_held: Callable[[], bool],
        on_prompt: Callable[[Sequence], None],
        on_end: Callable[[Sequence], None],
        on_free: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._device = device
        self._spec = spec
        self._has_feature = has_feature
        self._is_held = is_held
        self._on_prompt = on_prompt
        self._on_end = on_end
        self._on_free = on_free
        self.pool = BlockPool(spec.num_blocks, spec.block_size, state_blocks=spec.state_blocks)
        self.budget, cost = size_steps_of(spec)
        self.queues = Queues(
            self.pool,
            NoMemory(),
            self.budget,
            Order(spec.batching.order, self.pool, self.budget, cost, spec.batching.ttft_s),
        )
        self.queues.features = self
        self._output: ScheduleOutput | None = None  # the running step
        self._unseen: list[Sequence] = []  # arrivals since the next step was planned
        self._unseen_features: set[str] = set()
        self.num_steps = 0

    @property
    def is_busy(self) -> bool:
        return self._output is not None

    @property
    def num_running(self) -> int:
        return self.queues.num_running + sum(one.state is SequenceState.RUNNING for one in self._unseen)

    @property
    def num_waiting(self) -> int:
        return self.queues.num_waiting + sum(one.state is SequenceState.WAITING for one in self._unseen)

    @property
    def num_waiting_tokens(self) -> int:
        new = (one for one in self._unseen if one.state is SequenceState.WAITING)
        return self.queues.num_waiting_tokens + sum(one.num_uncomputed for one in new)

    # ------------------------------------------------------------------ requests

    def submit(self, sequence: Sequence) -> None:
        self._unseen.append(sequence)
        if self._output is None or not self._spec.runs_ahead:
            self._see()
        self.begin()

    def reserve(self, num_tokens: int, hashes: list[bytes], arrival_s: float) -> Any:
        """Reserve blocks for a prompt whose KV comes from P; None: not now."""
        blocks = self.queues.reserve(num_tokens, 1, hashes, arrival_s)
        self.queues.stop_reserving()
        return blocks

    def resume(self, sequence: Sequence, blocks: Any) -> None:
        """Decode a sequence whose prompt's KV is in ``blocks``; its first token is known."""
        self.queues.forget_reservation(blocks)
        sequence.blocks, sequence.forks = blocks.root, blocks.forks
        sequence.num_computed = sequence.num_tokens
        sequence.move_to(SequenceState.RUNNING)
        self.queues.tables.register(sequence)
        sequence.output_ids.append(0)
        if len(sequence.output_ids) >= sequence.max_tokens:
            self._retire(sequence)
            self._on_end(sequence)
            self.begin()
        else:
            self.submit(sequence)

    def transferred(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence whose KV was transferred."""
        self._retire(sequence)
        self._on_free()
        self.begin()

    def take_feature(self, key: str) -> None:
        if self.num_waiting or self.num_running:
            if self._output is not None and self._spec.runs_ahead:
                self._unseen_features.add(key)
            self.begin()

    def has(self, mm_hash: str) -> bool:
        return mm_hash not in self._unseen_features and self._has_feature(mm_hash)

    def starved(self, mm_hash: str) -> None:
        pass

    # ------------------------------------------------------------------ steps

    def _see(self) -> None:
        for sequence in self._unseen:
            if sequence.state is SequenceState.RUNNING:
                self.queues.run(sequence)
            else:
                self.queues.submit(sequence)
        self._unseen = []
        self._unseen_features.clear()

    def begin(self) -> None:
        """Begin a step if none is running, no encode goes first, and there is work."""
        if self._output is not None or not (self.num_running or self.num_waiting) or self._is_held():
            return
        output = self.queues.plan(self._clock.now)
        if not output and (self._unseen or self._unseen_features):
            self._see()
            output = self.queues.plan(self._clock.now)
        if output.admitted:
            self._on_free()  # a queue place is free
        if not output:
            return
        self._see()
        self._output = output
        work = StepWork.of(
            [sequence.num_tokens for sequence in output.decodes],
            [(sequence.num_computed, count) for sequence, count in output.prefills],
        )
        activity = self._activity_of(work, output)
        activity.on_end = lambda: self._ended(work, output, activity)
        self._device.start(activity)

    def _activity_of(self, work: StepWork, output: ScheduleOutput) -> Activity:
        profile = self._spec.profile
        lines = profile.step if output.prefills else profile.decode_lines(len(output.decodes))
        seconds = [
            line.seconds(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs)
            for line in lines
        ]
        work_s = max(seconds)
        compute = bandwidth = 1.0
        if profile.kind == "analytic" and len(seconds) == 2:
            launch_s = profile.step[0].base_s
            compute = profile.compute_share * (seconds[0] - launch_s) / work_s
            bandwidth = profile.bandwidth_share * (seconds[1] - launch_s) / work_s
        return Activity(compute=compute, bandwidth=bandwidth, work_s=work_s)

    def _ended(self, work: StepWork, output: ScheduleOutput, activity: Activity) -> None:
        self._output = None
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
                self._prompt_done(sequence)
        pace = self.budget.pace  # it learns as in an instance (Batching.stepped)
        if isinstance(pace, StepPace) and (output.prefills or not self._spec.role.prefills):
            pace.observe(work, self._clock.now - activity.begun_s)
        self.begin()

    def _prompt_done(self, sequence: Sequence) -> None:
        if sequence.hand_off:
            self.queues.stop(sequence)
            sequence.move_to(SequenceState.TRANSFERRING)
            self._on_prompt(sequence)
            return
        was_preempted = bool(sequence.output_ids)
        sequence.output_ids.append(0)
        if not was_preempted:
            self._on_prompt(sequence)
        if len(sequence.output_ids) >= sequence.max_tokens:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.queues.stop(sequence)
        self._retire(sequence)
        self._on_free()
        self._on_end(sequence)

    def _retire(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.FINISHED)
        self.queues.tables.release(sequence)
