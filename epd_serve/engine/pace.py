"""Measured times of steps: budgets from an SLO, the order of prompts, and the watchdog of steps that hang."""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from device.base import BareDevice, DeviceLost
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions
from epd_serve.models.family import Family
from epd_serve.sched.queues import Order
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_cost import ChunkPace, StepCost, StepPace, latency_limit_s, search_budget, work_done
from epd_serve.sched.step_sizes import Limits, StepShape, prompts_of, size_steps
from epd_serve.types import SamplingParams

if TYPE_CHECKING:
    from epd_serve.engine.step import StepRunner
    from epd_serve.models.tower import Tower

logger = logging.getLogger(__name__)

#: Side, in pixels, of the square images used to measure encodes.
IMAGE_SIDE = 448
#: Time limit for measuring encodes, and again for steps: an SLO adds up to 10 s to a start, plus the last ones.
MEASURE_S = 5.0
#: Runs of which the median counts.
_RUNS = 3
#: Prompt tokens of the first step with decodes, and of each step without: larger steps gain 2 % but delay aborts.
_FIRST_CHUNK_ON_CPU, _CHUNK_ON_CPU = 256, 1024
#: A step hangs if it takes FACTOR times the mean of its kind and at least LEAST_S seconds: swapping, or sharing
#: the device, can slow down a healthy step by far.
FACTOR = 20.0
LEAST_S = 60.0
#: Most seconds counted between two checks, because a suspended process does not compute.
_MOST_BETWEEN_LOOKS_S = 1.0
_SMOOTHING = 0.3
_GREEDY = SamplingParams(seed=0, temperature=0.0)
SizeT = TypeVar("SizeT")


class StepLimits:
    """Finds the budgets of an instance at its start.

    Without a limit they come from its options, and the times of earlier steps determine the chunks of a step
    (:class:`~epd_serve.sched.step_cost.ChunkPace`).

    Args:
        known: seconds that this process measured before, kept for the next switch to the role.

    Attributes:
        limit_s: LATENCY_max of steps and encodes; None: no limit.
    """

    def __init__(self, options: InstanceOptions, known: dict[str, float]) -> None:
        self._options, self._known = options, known
        self._cost = StepCost()
        slo, sizes = options.slo, options.sizes
        self._ttft_s = None if slo.ttft_ms is None else slo.ttft_ms / 1000
        tpot_s = None if slo.tpot_ms is None else slo.tpot_ms / 1000
        self.limit_s = latency_limit_s(options.role, ttft_s=self._ttft_s, tpot_s=tpot_s)
        self.image_budget_pixels = options.image_budget_pixels
        self.budget = Budget(max_num_tokens=sizes.max_num_batched_tokens, max_num_seqs=sizes.max_num_seqs)

    # ------------------------------------------------------------------ at the start

    def find_image_budget(self, area: int, seconds: Callable[[int], float]) -> int:
        """Return the largest batch of images within the limit, in pixels; at least one image.

        Args:
            area: pixels seen by the tower for a square image of side 448.
            seconds: returns the time to encode a number of these images.
        """
        if self.limit_s is not None:
            most = max(1, self.image_budget_pixels // area)
            found = search_budget(self._within_time("encode", seconds), self.limit_s, most)
            self._report(f"encodes of images of {IMAGE_SIDE}x{IMAGE_SIDE} pixels", *found, self.limit_s)
            self.image_budget_pixels = found[0] * area
        return self.image_budget_pixels

    def find_budget(self, seconds: Callable[[StepShape], float], *, num_blocks: int, max_model_len: int) -> Budget:
        """Return the budget of a step, given the ``seconds`` of sample steps (:func:`size_steps`).

        A fit of all measurements predicts mixed steps; it bounds the chunks of a step and the admitted sequences.
        """
        if self.limit_s is None:
            most = self.budget.max_num_tokens
            on_cpu = self._options.device == "cpu"
            first, alone = (_FIRST_CHUNK_ON_CPU, _CHUNK_ON_CPU) if on_cpu else (most, most)
            self.budget = replace(self.budget, pace=ChunkPace(min(first, most), min(alone, most)))
            if self._options.batching.order != "slack":
                return self.budget
        block = self._options.tokens_per_block
        limits = Limits(
            latency_s=self.limit_s,
            decodes=self._options.role.decodes,
            max_num_tokens=self.budget.max_num_tokens,
            max_num_seqs=self.budget.max_num_seqs,
            num_blocks=num_blocks,
            block_size=block,
            max_model_len=max_model_len,
        )
        sizes = size_steps(self._within_time("step", seconds), limits)
        if limits.decode_s is not None and sizes.decodes is not None:
            self._report("decodes", *sizes.decodes, limits.decode_s)
        if self.limit_s is not None and sizes.prefills is not None:
            self._report(f"prefills of {limits.chunk} tokens", *sizes.prefills, self.limit_s)
        self._cost = sizes.cost
        if self.limit_s is not None:
            self.budget = sizes.budget
        return self.budget

    def _within_time(self, what: str, measure: Callable[[SizeT], float]) -> Callable[[SizeT], float]:
        """Return ``measure``, which remembers its results and returns infinity after ``MEASURE_S`` seconds."""
        begun_s: float | None = None

        def seconds(size: SizeT) -> float:
            nonlocal begun_s
            key = f"{self._options.role} {what} {size}"
            if key not in self._known:
                if begun_s is None:
                    logger.info("measuring each %s for the SLO for up to %g s", what, MEASURE_S)
                    begun_s = time.monotonic()
                elif time.monotonic() - begun_s > MEASURE_S:
                    return math.inf
                self._known[key] = measure(size)
            return self._known[key]

        return seconds

    def _report(self, what: str, size: int, seconds: float, limit_s: float) -> None:
        if seconds <= limit_s:
            return
        assert self.limit_s is not None
        logger.warning(
            "%s cannot be met: the smallest batch, %d %s, takes %.1f ms, above its limit of %.1f ms; "
            "the lowest feasible limit is %.1f ms",
            "slo.tpot_ms" if self._options.role.decodes else "half of slo.ttft_ms",
            size,
            what,
            1000 * seconds,
            1000 * limit_s,
            1000 * seconds * self.limit_s / limit_s,
        )

    # ------------------------------------------------------------------ while it serves

    def order(self, pool: BlockPool) -> Order:
        """Return the order of the waiting queue."""
        return Order(self._options.batching.order, pool, self.budget, self._cost, self._ttft_s)

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Update the budget's pace, if any, with a finished step."""
        pace = self.budget.pace
        if isinstance(pace, ChunkPace):
            pace.observe(output.num_tokens - len(output.decodes), seconds)
        elif pace is not None and (output.prefills or not self._options.role.prefills):
            pace.observe(work_done(output.decodes, output.prefills), seconds)

    def summary(self) -> dict[str, float]:
        """Return the budgets for ``/info``."""
        pace = self.budget.pace
        return {
            "max_num_batched_tokens": self.budget.max_num_tokens,
            "max_num_seqs": self.budget.max_num_seqs,
            "image_budget_pixels": self.image_budget_pixels,
            "feature_cache_bytes": self._options.sizes.feature_cache_bytes,
            **({} if self.limit_s is None else {"limit_ms": 1000 * self.limit_s}),
            **({"correction": pace.correction} if isinstance(pace, StepPace) else {}),
            **({"chunk_tokens": pace.num_tokens} if isinstance(pace, ChunkPace) else {}),
        }


@dataclass(frozen=True, eq=False)
class StepTimer:
    """Measures steps in unused blocks: ``num_blocks``, followed by ``state_blocks``."""

    runner: StepRunner
    _: KW_ONLY
    num_blocks: int
    block_size: int
    num_position_axes: int
    state_blocks: int = 0
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, shape: StepShape, least_s: float = 0.0) -> float:
        """Return the median time of a step (see :func:`median_s`). The pool must hold all contexts."""
        return median_s(self.step(shape), self.clock, least_s)

    def step(self, shape: StepShape, sampling: SamplingParams = _GREEDY) -> Callable[[], object]:
        """Return a callable that repeats the same step."""
        blocks = iter(range(1, self.num_blocks))
        decodes = [self._sequence(blocks, context - 1, 1, sampling) for context in shape.contexts]
        for sequence in decodes:
            sequence.output_ids.append(sequence.prompt_ids.pop())
        prefills = [(self._sequence(blocks, start, count, sampling), count) for start, count in shape.chunks]
        output = ScheduleOutput(decodes=decodes, prefills=prefills)

        def run() -> None:
            step = self.runner.launch(output, {})
            step.sample()
            step.read()

        return run

    def warm_up(self, compiled_by: AbstractSequence[tuple[int, int]], max_num_tokens: int, longest: int) -> None:
        """Compute steps that use each of the device's kernels, so that requests never wait for a compilation.

        ``compiled_by``: see :class:`device.base.AttentionOps`; impossible steps are skipped.
        """
        sampling = SamplingParams(seed=0, temperature=1.0, top_p=0.9)
        for count, context in compiled_by:
            chunks = prompts_of(count, longest)
            shape = StepShape(num_decodes=1 if context else 0, context=context, chunks=chunks)
            has_room = shape.num_blocks(self.block_size) < self.num_blocks
            if has_room and count <= max_num_tokens and context <= longest:
                self.step(shape, sampling)()
        if compiled_by:  # greedy: a replayed decode, and a chunk behind a cached prefix
            self.step(StepShape(num_decodes=1, context=2))()
            self.step(StepShape(chunks=((self.block_size, 1),)))()

    def _sequence(
        self, blocks: Iterator[int], num_computed: int, count: int, sampling: SamplingParams
    ) -> Sequence:
        import torch

        length, behind = num_computed + count, self.num_blocks
        return Sequence(
            request_id="profile",
            prompt_ids=[0] * length,
            sampling=sampling,
            max_tokens=1,
            positions=torch.arange(length).expand(self.num_position_axes, -1),
            num_computed=num_computed,
            blocks=[next(blocks) for _ in range(-(-length // self.block_size))],
            # shared by all, because the contents are never read
            states=[list(range(behind, behind + self.state_blocks))] if self.state_blocks else [],
            state=SequenceState.RUNNING,
        )


def encode_seconds(
    tower: Tower,
    family: Family,
    num_images: int,
    *,
    side: int = IMAGE_SIDE,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median time to encode a batch of square images."""
    inputs = family.blank_inputs((side, side))
    return median_s(lambda: tower.encode([inputs] * num_images), clock)


def median_s(
    run: Callable[[], object], clock: Callable[[], float] = time.perf_counter, least_s: float = 0.0
) -> float:
    """Return the median time of ``run`` after warming up once, or for ``least_s``.

    The warm-up matters: on a CPU a small model's decode takes 1.5 times as long after different work.
    """
    for count in (1, _RUNS):
        times: list[float] = []
        while len(times) < count or sum(times) < least_s:
            start = clock()
            run()
            times.append(clock() - start)
    return statistics.median(times)


class StepWatch:
    """Measures the steps of one thread and compares the running step with them.

    The first step of a kind may compile for minutes and never counts as hanging.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s: dict[Hashable, float] = {}
        self._step: tuple[object, float | None] | None = None  # the running step, and the mean of its kind
        self._seen: tuple[object, float | None] | None = None
        self._seen_s = 0.0
        self._looked_s = clock()

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Compute a step within this context. Steps of one ``kind`` take about the same time."""
        began_s, mean_s = self._clock(), self._mean_s.get(kind)
        self._step = object(), mean_s
        try:
            yield
        finally:
            self._step = None
        seconds = self._clock() - began_s
        self._mean_s[kind] = seconds if mean_s is None else mean_s + _SMOOTHING * (seconds - mean_s)

    def overdue(self) -> str | None:
        """Return a sentence about the running step if it hangs, otherwise None.

        Call it at least once a second, from one thread.
        """
        now = self._clock()
        passed_s, self._looked_s = min(now - self._looked_s, _MOST_BETWEEN_LOOKS_S), now
        step = self._step
        if step is None or step is not self._seen:
            self._seen, self._seen_s = step, 0.0
            return None
        self._seen_s += passed_s
        _, usual_s = step
        if usual_s is None or self._seen_s < max(FACTOR * usual_s, LEAST_S):
            return None
        return f"it has run for {self._seen_s:.0f} s; {usual_s:.2g} s is usual"


def end_process() -> None:
    """End this process at once after a fatal error; its supervisor restarts it."""
    logging.shutdown()
    os._exit(1)


def end_if_lost(device: BareDevice) -> None:
    """End this process if its device is lost, since no step on it will succeed again."""
    try:
        device.check()
    except DeviceLost as error:
        logger.critical("%s; this process ends", error)
        end_process()
