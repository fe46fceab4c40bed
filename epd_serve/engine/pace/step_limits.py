"""An instance's budgets and orders, made from its SLO, its options and its measured times."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from device.base import BareDevice
from epd_serve import __version__
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions
from epd_serve.engine.pace.measurements import IMAGE_SIDE, Measurements, cache_dir
from epd_serve.sched.orders import Order, order_of
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.step_cost import (
    ChunkPace,
    Found,
    StepCost,
    StepPace,
    latency_limit_s,
    search_budget,
    work_done,
)
from epd_serve.sched.step_sizes import Limits, StepShape, size_steps

logger = logging.getLogger(__name__)

_FIRST_CHUNK_ON_CPU = 256
#: For encodes, and for steps: a start with an SLO takes 10 s longer at most, but for the last of each.
MEASURE_S = 5.0
#: Cores that others may use while measurements are made that are kept.
_MOST_OTHERS = 0.25


class StepLimits:
    """Finds the budgets of an instance at its start. Without a limit they are those of its options, and the chunks
    of a step follow from the times of the steps before (:class:`~epd_serve.sched.step_cost.ChunkPace`).

    Attributes:
        limit_s: LATENCY_max of steps and encodes; None: no limit.
        image_budget_pixels: most pixels of an encode.
        budget: limits of a step.
    """

    def __init__(
        self,
        options: InstanceOptions,
        measurements: Measurements,
        *,
        clock: Callable[[], float] = time.monotonic,
        others_s: Callable[[], float] | None = None,
    ) -> None:
        """``others_s``: CPU seconds that others have used on this machine, by default on a CPU alone."""
        self._options = options
        self._clock = clock
        self._others_s = others_s or (cpu_seconds_of_others if options.device == "cpu" else lambda: 0.0)
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
        """The largest batch of images within the limit, in pixels; one image at least.

        Args:
            area: pixels that the tower sees of a square image of 448 pixels.
            seconds: the time to encode so many of these.
        """
        if self.limit_s is not None:
            measuring = _Measuring(self._known, "encodes", self._clock, self._others_s)
            found = search_budget(
                lambda count: measuring.seconds(f"encode {count}", lambda: seconds(count)),
                self.limit_s,
                1,
                max(1, self.image_budget_pixels // area),
            )
            measuring.save()
            self._report(f"encodes of images of {IMAGE_SIDE}x{IMAGE_SIDE} pixels", found, self.limit_s)
            self.image_budget_pixels = found.size * area
        return self.image_budget_pixels

    def find_budget(self, seconds: Callable[[StepShape], float], *, num_blocks: int, max_model_len: int) -> Budget:
        """The budget of a step by the ``seconds`` of some (:func:`size_steps`).

        What a step of many kinds takes follows from a fit of all that was measured: it bounds the chunks of a step
        and the sequences that are let in.
        """
        if self.limit_s is None:
            most = self.budget.max_num_tokens  # on a CPU a step of thousands may take a minute
            first = min(_FIRST_CHUNK_ON_CPU, most) if self._options.device == "cpu" else most
            self.budget = replace(self.budget, pace=ChunkPace(first))
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
        measuring = _Measuring(self._known, "steps", self._clock, self._others_s)
        sizes = size_steps(lambda shape: measuring.seconds(f"step {shape}", lambda: seconds(shape)), limits)
        measuring.save()
        if limits.decode_s is not None and sizes.decodes is not None:
            self._report("decodes", sizes.decodes, limits.decode_s)
        if self.limit_s is not None and sizes.prefills is not None:
            self._report(f"prefills of {limits.chunk} tokens", sizes.prefills, self.limit_s)
        self._cost = sizes.cost
        if self.limit_s is not None:
            self.budget = sizes.budget
        median = sizes.errors[len(sizes.errors) // 2]
        logger.info("steps: %s, off by %.0f %% (median)", self._cost, 100 * median)
        return self.budget

    def _report(self, what: str, found: Found, limit_s: float) -> None:
        slo = "slo.tpot_ms" if self._options.role.decodes else "half of slo.ttft_ms"
        if found.feasible:
            logger.info(
                "budget: %d %s take %.1f of %.1f ms", found.size, what, 1000 * found.seconds, 1000 * limit_s
            )
        else:
            assert self.limit_s is not None
            logger.warning(
                "%s cannot be met: the smallest batch, %d %s, takes %.1f ms and may take %.1f ms; "
                "the least limit that could be met is %.1f ms",
                slo,
                found.size,
                what,
                1000 * found.seconds,
                1000 * limit_s,
                1000 * found.seconds * self.limit_s / limit_s,
            )

    # ------------------------------------------------------------------ while it serves

    def order(self, pool: BlockPool) -> Order:
        """The order of the waiting queue (:func:`~epd_serve.sched.orders.order_of`)."""
        return order_of(self._options.batching.order, pool, self.budget, self._cost, self._ttft_s)

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Correct the pace of a budget that has one by a step that has just ended."""
        pace = self.budget.pace
        if isinstance(pace, ChunkPace):
            pace.observe(output.num_tokens - len(output.decodes), seconds)
        elif pace is not None and (output.prefills or not self._options.role.prefills):
            pace.observe(work_done(output.decodes, output.prefills), seconds)

    def summary(self) -> dict[str, float]:
        """The budgets for ``/info``."""
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


class _Measuring:
    """The measurements of one kind at a start: they take so long and no longer, and are kept if they are sound.

    A step is not measured once the time is up, and counts as beyond any limit. What was measured while others used
    the cores is used until the end of the process, and measured again at the next start.
    """

    def __init__(
        self, known: Measurements, what: str, clock: Callable[[], float], others_s: Callable[[], float]
    ) -> None:
        self._known, self._what, self._clock, self._others_s = known, what, clock, others_s
        self._begun: tuple[float, float] | None = None

    def seconds(self, key: str, measure: Callable[[], float]) -> float:
        """Return the seconds that are known, else measured, else infinity."""
        if key in self._known:
            return self._known.get(key, measure)
        if self._begun is None:
            logger.info(
                "measuring %s for the SLO, for %g s at most; kept in %s: remove it to measure again",
                self._what,
                MEASURE_S,
                self._known.file or "no file",
            )
            self._begun = self._clock(), self._others_s()
        elif self._clock() - self._begun[0] > MEASURE_S:
            return math.inf
        return self._known.get(key, measure)

    def save(self) -> None:
        """Keep new measurements where others left the cores alone."""
        if self._begun is None:
            return
        took_s, others_s = self._clock() - self._begun[0], self._others_s() - self._begun[1]
        if others_s > _MOST_OTHERS * took_s:
            logger.warning("%s were measured beside other work, and are not kept for the next start", self._what)
            return
        self._known.save()


def cpu_seconds_of_others() -> float:
    """Return the CPU seconds that other processes have used on this machine since it started."""
    times, own = psutil.cpu_times(), os.times()
    return times.user + times.system - own.user - own.system


def measurements(options: InstanceOptions, device: BareDevice, fingerprint: str, torch: str = "") -> Measurements:
    """The known measurements of an instance like this one, in this user's cache.

    Args:
        fingerprint: of the model and the dtype.
        torch: its version.
    """
    about: dict[str, str | int | None] = {
        "role": str(options.role),  # instances of different roles start at once and measure different things
        "model": fingerprint,
        "device": f"{device.type} {device.description}",
        "threads": options.threads,
        "cores": device.cores,
        "share": None if options.device_share is None else f"{options.device_share.share:g}",
        "tower_share": None if options.tower_share is None else f"{options.tower_share:g}",
        "max_num_seqs": options.sizes.max_num_seqs,
        "block_size": options.tokens_per_block,
        "epd_serve": __version__,
        "torch": torch,
    }
    return Measurements(cache_dir(os.environ), about)
