"""The language model of a simulated instance: the real queues, schedule and block pool; steps of known length.

Steps of nothing but decodes, in which nothing can change, are taken together. That is the same as taking them one
by one: the plan of a step is a function of the queues, the pool and (under the order "slack") the time; while no
sequence comes, goes or lacks a block, each plan names the same decodes. What would be admitted stays out, because
contexts grow and free blocks only get fewer; where neither holds for sure, steps are taken singly. Whoever changes
a queue or the pool from outside first calls :meth:`LanguageSide.settle`, which brings the state to that of the
step under way.

An instance that runs ahead plans a step when the one before it begins: what comes meanwhile is in a later one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from epd_serve.cache.block_pool import BlockPool, num_blocks_for
from epd_serve.cost.profile import Profile
from epd_serve.sched.orders import order_of
from epd_serve.sched.queues import Queues
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_cost import StepPace, StepWork
from epd_serve.sim.device import Activity, Clock, SimDevice
from epd_serve.sim.spec import SimInstanceSpec, size_steps_of

_TOKENS = [0] * 4096


class NoMemory:
    """KV without bytes."""

    def copy_block(self, source: int, target: int) -> None:
        pass

    def save(self, blocks: Any) -> int:
        return len(blocks)

    def restore(self, saved: Any, first: int, blocks: Any) -> None:
        pass


class LanguageSide:
    """One step loop.

    Args:
        has_feature: whether a media item of a sequence could be computed now.
        on_prompt: told of a sequence whose prompt is computed; it has its first token.
        on_end: told of a sequence that has all of its tokens; its blocks are free.
        on_tokens: told of a sequence, its number of new tokens and when they came, or None.
        may_start: asked before each step; False: :meth:`kick` will be called.
        on_step: told when a step is over, before the next one begins.
    """

    def __init__(
        self,
        clock: Clock,
        device: SimDevice,
        spec: SimInstanceSpec,
        *,
        has_feature: Callable[[str], bool],
        on_prompt: Callable[[Sequence], None],
        on_end: Callable[[Sequence], None],
        on_tokens: Callable[[Sequence, int, float], None] | None,
        on_free: Callable[[], None],
        may_start: Callable[[], bool],
        on_step: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._device = device
        self._spec = spec
        self._on_prompt = on_prompt
        self._on_end = on_end
        self._on_tokens = on_tokens
        self._on_free = on_free
        self._may_start = may_start
        self._on_step = on_step
        self.pool = BlockPool(spec.num_blocks, spec.block_size, state_blocks=spec.state_blocks)
        self.budget, self._cost = size_steps_of(spec)
        self._jumps = spec.batching.order != "slack"
        self._has_feature = lambda key: key not in self._unseen_features and has_feature(key)
        self.queues = self._new_queues()
        self._run: StepRun | None = None
        self._activity: Activity | None = None
        self._leaving: list[Sequence] = []  # ABORTED, and in the step under way
        self._unseen: list[Sequence] = []  # came since the next step was planned
        self._unseen_features: set[str] = set()
        self.num_steps = 0
        self.num_preempted = 0

    @property
    def is_busy(self) -> bool:
        return self._run is not None

    # ------------------------------------------------------------------ from outside

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

    def submit(self, sequence: Sequence) -> None:
        self.settle()
        self._unseen.append(sequence)
        if self._run is None or not self._spec.runs_ahead:
            self._see()
        self.kick()

    def _see(self) -> None:
        for sequence in self._unseen:
            if sequence.state is SequenceState.RUNNING:
                self.queues.run(sequence)
            else:
                self.queues.submit(sequence)
        self._unseen = []
        self._unseen_features.clear()

    def reserve(self, num_tokens: int, hashes: list[bytes], arrival_s: float) -> Any:
        """Blocks for a prompt whose KV comes from elsewhere; None: not now."""
        self.settle(cut=False)
        blocks = self.queues.reserve(num_tokens, 1, hashes, arrival_s)
        self.queues.stop_reserving()
        if blocks is not None:
            self._shorten_to_room()
        return blocks

    def resume(self, sequence: Sequence, blocks: Any) -> None:
        """Go on with a prompt whose KV was written into ``blocks``; its first token is known."""
        self.settle()
        self.queues.settle(blocks)
        sequence.blocks, sequence.forks = blocks.root, blocks.forks
        sequence.num_computed = sequence.num_tokens
        sequence.move_to(SequenceState.RUNNING)
        self.queues.tables.register(sequence)
        sequence.output_ids.append(0)
        if len(sequence.output_ids) >= sequence.max_tokens:
            self._retire(sequence)
            self._on_end(sequence)
            self.kick()
        else:
            self.submit(sequence)

    def unreserve(self, blocks: Any) -> None:
        self.settle(cut=self.queues.num_waiting > 0)
        self.queues.settle(blocks)
        self.pool.release(blocks.all())
        self._freed()

    def transferred(self, sequence: Sequence) -> None:
        """Its KV is elsewhere: the blocks are free."""
        self.settle(cut=self.queues.num_waiting > 0)
        self._retire(sequence)
        self._freed()

    def abort(self, request_id: str) -> None:
        """Blocks of its sequences are free when the step under way has ended."""
        self.settle()
        self._see()
        for sequence in self.queues.remove(request_id):
            sequence.move_to(SequenceState.ABORTED)
            if self._run is not None and sequence in self._run.output.sequences:
                self._leaving.append(sequence)
            else:
                self._retire(sequence)
        self._freed()

    def take_feature(self, key: str) -> None:
        """A feature has come."""
        if self.num_waiting or self.num_running:
            self.settle()
            if self._run is not None and self._spec.runs_ahead:
                self._unseen_features.add(key)
            self.kick()

    def drop_all(self) -> None:
        """The process has died: of what it had, the tokens are left that it gave out."""
        self.settle(cut=False)
        if self._activity is not None:
            self._device.stop(self._activity)
        self._run = self._activity = None
        self._leaving = []
        self._unseen = []
        self._unseen_features.clear()
        spec = self._spec
        self.pool = BlockPool(spec.num_blocks, spec.block_size, state_blocks=spec.state_blocks)
        self.queues = self._new_queues()

    def kick(self) -> None:
        """Begin a step if none is under way and there is something to compute."""
        if self._run is None and (self.num_running or self.num_waiting) and self._may_start():
            self._begin()

    # ------------------------------------------------------------------ steps

    def _begin(self) -> None:
        output = self.queues.plan(self._clock.now)
        if not output and (self._unseen or self._unseen_features):
            self._see()
            output = self.queues.plan(self._clock.now)
        self.num_preempted += len(output.preempted)
        if output.admitted:
            self._on_free()  # a place in the queue
        if not output:
            return
        run = StepRun(
            self._spec.profile, output, 1 if self._unseen or self._unseen_features else self._length(output)
        )
        self._see()
        self._run = run
        total_s = run.total_s(run.length)
        self._activity = Activity(run.compute, run.bandwidth, total_s, self._ended)
        self._device.start(self._activity)

    def _length(self, output: ScheduleOutput) -> int:
        """Steps that are surely like this one, itself included."""
        if output.prefills or output.admitted or output.preempted or (not self._jumps and self.queues.num_waiting):
            return 1
        left = min(s.max_tokens - len(s.output_ids) for s in output.decodes)
        return 1 + self._room(output.decodes, left - 1)

    def _room(self, decodes: list[Sequence], most: int) -> int:
        """Further steps for which the pool has blocks, ``most`` at most."""
        size, free = self.pool.block_size, self.pool.num_free
        if most <= 0 or len(decodes) * num_blocks_for(most, size) <= free:
            return max(most, 0)

        def missing(count: int) -> int:
            return sum(max(num_blocks_for(s.num_tokens + count, size) - len(s.blocks), 0) for s in decodes)

        return bisect_right(range(1, most + 1), free, key=missing)

    def settle(self, *, cut: bool = True) -> None:
        """Bring sequences and pool to the step under way; ``cut``: that step ends what is taken together."""
        run, activity = self._run, self._activity
        if run is None or activity is None or run.length == 1:
            return
        done = run.steps_within(self._device.progress(activity))
        if done > run.num_applied:
            self._advance(run, done)
        if cut and done + 1 < run.length:
            run.length = done + 1
            self._device.shorten(activity, run.total_s(run.length))

    def _shorten_to_room(self) -> None:
        """Blocks were taken by others."""
        run, activity = self._run, self._activity
        if run is None or activity is None or run.num_applied + 1 >= run.length:
            return
        length = run.num_applied + 1 + self._room(run.output.decodes, run.length - run.num_applied - 1)
        if length < run.length:
            run.length = length
            self._device.shorten(activity, run.total_s(length))

    def _advance(self, run: StepRun, done: int) -> None:
        """``done`` of the run's steps are over and another one is under way."""
        count = done - run.num_applied
        run.num_applied = done
        self._count(run.output.decodes, count)
        for sequence in run.output.decodes:
            grown = self.queues.tables.grow(sequence)
            assert grown, "a run is as long as there are blocks"

    def _count(self, decodes: list[Sequence], count: int) -> None:
        self.num_steps += count
        for sequence in decodes:
            sequence.output_ids += _TOKENS[:count]
            sequence.num_computed += count
            if self._on_tokens is not None and sequence.state is SequenceState.RUNNING:
                self._on_tokens(sequence, count, self._clock.now)

    def _ended(self) -> None:
        run, activity = self._run, self._activity
        assert run is not None and activity is not None
        if run.length - 1 > run.num_applied:
            self._advance(run, run.length - 1)
        self._run = self._activity = None
        output = run.output
        for sequence, count in output.prefills:
            sequence.num_computed += count
            if sequence.blocks:
                self.queues.tables.register(sequence)
        self._count(output.decodes, 1)
        for sequence in output.decodes:
            if len(sequence.output_ids) >= sequence.max_tokens and sequence.state is SequenceState.RUNNING:
                self._finish(sequence)
        for sequence, _ in output.prefills:
            if not sequence.num_uncomputed and sequence.state is SequenceState.RUNNING:
                self._prompt_done(sequence)
        self._observe(run, activity)
        for sequence in self._leaving:
            self._retire(sequence)
        if self._leaving:
            self._leaving = []
            self._on_free()
        self._on_step()
        self.kick()

    def _observe(self, run: StepRun, activity: Activity) -> None:
        """As Batching.stepped does for each step; where some were taken together, all were slowed down alike."""
        pace = self.budget.pace
        if not isinstance(pace, StepPace) or not (run.output.prefills or not self._spec.role.prefills):
            return
        slowdown = (self._clock.now - activity.begun_s) / activity.work_s
        for work, seconds in run.steps():
            pace.observe(work, seconds * slowdown)

    def _prompt_done(self, sequence: Sequence) -> None:
        if sequence.hand_off:
            self.queues.stop(sequence)
            sequence.move_to(SequenceState.TRANSFERRING)
            self._on_prompt(sequence)
            return
        again = bool(sequence.output_ids)
        sequence.output_ids.append(0)
        if self._on_tokens is not None and again:
            self._on_tokens(sequence, 1, self._clock.now)
        if not again:
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

    def _freed(self) -> None:
        self._on_free()
        self.kick()

    def _new_queues(self) -> Queues:
        batching = self._spec.batching
        return Queues(
            self.pool,
            NoMemory(),
            self.budget,
            order_of(batching.order, self.pool, self.budget, self._cost, batching.ttft_s),
            has_feature=self._has_feature,
            on_starved=lambda mm_hash: None,
            on_lost=lambda request_id, error: None,
        )


_EPSILON = 1e-9


class StepRun:
    """``length`` steps that begin with ``output``. Each decode's context grows by one token a step.

    Attributes:
        num_applied: how many of them sequences and pool know of already.
        compute, bandwidth: of the device's peak, the parts that the steps use.
    """

    __slots__ = ("_lines", "_work", "bandwidth", "compute", "length", "num_applied", "output")

    def __init__(self, profile: Profile, output: ScheduleOutput, length: int) -> None:
        work = StepWork.of(
            [sequence.num_tokens for sequence in output.decodes],
            [(sequence.num_computed, count) for sequence, count in output.prefills],
        )
        self.output = output
        self._work = work
        self.num_applied = 0
        # (seconds of the first step, what each further one takes longer)
        self._lines = [
            (
                line.seconds(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs),
                line.context_s * len(output.decodes),
            )
            for line in (profile.step if output.prefills else profile.decode_lines(len(output.decodes)))
        ]
        self.length = self._uniform(length)
        first_s = max(first for first, _ in self._lines)
        if profile.kind == "analytic" and len(self._lines) == 2:
            launch_s = profile.step[0].base_s
            self.compute = profile.compute_share * (self._lines[0][0] - launch_s) / first_s
            self.bandwidth = profile.bandwidth_share * (self._lines[1][0] - launch_s) / first_s
        else:
            self.compute = self.bandwidth = 1.0

    def _uniform(self, length: int) -> int:
        """Return how many of the first steps have the same largest line: lines cross once at most."""
        if length == 1 or len(self._lines) == 1:
            return length
        longest = max(self._lines)
        if all(longest[0] + longest[1] * (length - 1) >= a + b * (length - 1) for a, b in self._lines):
            return length
        return bisect_right(
            range(1, length + 1),
            0,
            key=lambda count: any(
                longest[0] + longest[1] * (count - 1) < a + b * (count - 1) for a, b in self._lines
            ),
        )

    def total_s(self, count: int) -> float:
        """Return the seconds of the first ``count`` steps."""
        first, more = max(self._lines)
        return count * first + more * count * (count - 1) / 2

    def steps(self) -> Iterator[tuple[StepWork, float]]:
        """The work and the seconds of each."""
        first, more = max(self._lines)
        work, num = self._work, len(self.output.decodes)
        for i in range(self.length):
            yield replace(work, decode_context=work.decode_context + i * num) if i else work, first + more * i

    def steps_within(self, seconds: float) -> int:
        """Whole steps that are over after so many seconds, less than all of them."""
        seconds += _EPSILON
        return bisect_right(range(1, self.length), seconds, key=self.total_s)
