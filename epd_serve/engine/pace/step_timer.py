"""Times of steps and encodes on this device, measured before the instance serves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import KW_ONLY, dataclass

import torch

from epd_serve.engine.pace.measurements import IMAGE_SIDE
from epd_serve.engine.step import StepRunner
from epd_serve.models.family import Family
from epd_serve.models.tower import Tower
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_sizes import StepShape, prompts_of
from epd_serve.types import SamplingParams

_RUNS = 3
_GREEDY = SamplingParams(seed=0, temperature=0.0)


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

    def _sequence(
        self, blocks: Iterator[int], num_computed: int, count: int, sampling: SamplingParams
    ) -> Sequence:
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
