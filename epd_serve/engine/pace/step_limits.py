"""Budgets and queue order of an instance, derived from its SLO, options and measured times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions
from epd_serve.engine.pace.measurements import IMAGE_SIDE, Measurements
from epd_serve.sched.queues import Order
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.step_cost import ChunkPace, StepCost, StepPace, latency_limit_s, search_budget, work_done
from epd_serve.sched.step_sizes import Limits, StepShape, size_steps

logger = logging.getLogger(__name__)

#: Prompt tokens of the first step with decodes, and of each step without: larger steps gain 2 % but delay aborts.
_FIRST_CHUNK_ON_CPU, _CHUNK_ON_CPU = 256, 1024


class StepLimits:
    """Finds the budgets of an instance at its start.

    Without a limit they come from its options, and the times of earlier steps determine the chunks of a step
    (:class:`~epd_serve.sched.step_cost.ChunkPace`).

    ``limit_s``: LATENCY_max of steps and encodes; None: no limit.
    """

    def __init__(self, options: InstanceOptions, measurements: Measurements) -> None:
        self._options = options
        self._known = measurements
        self._cost = StepCost()
        self._ttft_s, tpot_s = (
            None if slo_ms is None else slo_ms / 1000 for slo_ms in (options.slo.ttft_ms, options.slo.tpot_ms)
        )
        self.limit_s = latency_limit_s(options.role, ttft_s=self._ttft_s, tpot_s=tpot_s)
        self.image_budget_pixels = options.image_budget_pixels
        sizes = options.sizes
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
            found = search_budget(
                lambda count: self._known.get(f"encode {count}", lambda: seconds(count)), self.limit_s, 1, most
            )
            self._known.save()
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
        sizes = size_steps(lambda shape: self._known.get(f"step {shape}", lambda: seconds(shape)), limits)
        self._known.save()
        if limits.decode_s is not None and sizes.decodes is not None:
            self._report("decodes", *sizes.decodes, limits.decode_s)
        if self.limit_s is not None and sizes.prefills is not None:
            self._report(f"prefills of {limits.chunk} tokens", *sizes.prefills, self.limit_s)
        self._cost = sizes.cost
        if self.limit_s is not None:
            self.budget = sizes.budget
        return self.budget

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
