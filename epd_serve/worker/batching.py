"""An instance's budgets and orders: what its SLO, its options and its measured times make of a step."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from functools import partial

import torch

from device.base import Device
from epd_serve import __version__
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import InstanceOptions
from epd_serve.models.family import Family
from epd_serve.models.tower import Tower
from epd_serve.request import Sequence
from epd_serve.sched.budget import (
    MIN_CHUNK,
    PREFILL_SHARE,
    Found,
    StepCost,
    StepPace,
    StepWork,
    latency_limit_s,
    search_budget,
    work_done,
)
from epd_serve.sched.language import Budget, ScheduleOutput
from epd_serve.sched.ordering import fcfs, sjf, slack
from epd_serve.sched.queues import Order
from epd_serve.worker.profile import IMAGE_SIDE, Measurements, StepShape, StepTimer, cache_dir, encode_seconds
from epd_serve.worker.runner import LanguageRunner

logger = logging.getLogger(__name__)


class Batching:
    """Finds the budgets of an instance at its start. Without a limit they are those of its options, unmeasured.

    Attributes:
        limit_s: LATENCY_max of steps and encodes; None: no limit.
        image_budget_pixels: most pixels of an encode.
        budget: of a step.
    """

    def __init__(self, options: InstanceOptions, measurements: Measurements) -> None:
        self._options = options
        self._known = measurements
        self._cost = StepCost()
        self._ttft_s, tpot_s = (
            None if slo_ms is None else slo_ms / 1000 for slo_ms in (options.slo_ttft_ms, options.slo_tpot_ms)
        )
        self.limit_s: float | None = None
        if options.batching_policy == "stage-level":
            self.limit_s = latency_limit_s(
                options.role, ttft_s=self._ttft_s, tpot_s=tpot_s, alpha=options.batching_alpha
            )
        self.image_budget_pixels = options.image_budget_pixels
        self.budget = Budget(max_num_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs)

    # ------------------------------------------------------------------ at the start

    def find_image_budget(self, tower: Tower, family: Family) -> int:
        """The largest batch of images within the limit, in pixels; one image at least."""
        area = family.num_pixels((IMAGE_SIDE, IMAGE_SIDE))
        if self.limit_s is not None:
            found = search_budget(
                lambda count: self._known.get(f"encode {count}", lambda: encode_seconds(tower, family, count)),
                self.limit_s,
                1,
                max(1, self.image_budget_pixels // area),
            )
            self._known.save()
            self._report(f"encodes of images of {IMAGE_SIDE}x{IMAGE_SIDE} pixels", found, self.limit_s)
            self.image_budget_pixels = found.size * area
        return self.image_budget_pixels

    def find_budget(
        self, runner: LanguageRunner, *, num_blocks: int, num_position_axes: int, max_model_len: int
    ) -> Budget:
        """The budget of a step, measured while nothing else uses the KV pool.

        The most sequences are found as decodes alone, with contexts of a block; the most tokens as prompts alone.
        What a mixture takes, and what contexts add, follows in each step from a fit of all that was measured
        (:class:`StepCost`): it bounds the chunks of a step and the sequences that are let in.
        """
        if self.limit_s is None and self._options.batching_order != "slack":
            return self.budget
        block = self._options.tokens_per_block
        timer = StepTimer(runner, num_blocks=num_blocks, block_size=block, num_position_axes=num_position_axes)
        samples: dict[StepWork, float] = {}

        def seconds(shape: StepShape) -> float:
            samples[shape.work] = self._known.get(f"step {shape}", lambda: timer.seconds(shape))
            return samples[shape.work]

        role, limit_s, capacity_tokens = self._options.role, self.limit_s, (num_blocks - 1) * block
        longest = max(min(max_model_len, capacity_tokens) // block * block, block)
        most_tokens, num_seqs = self.budget.max_num_tokens, self.budget.max_num_seqs
        num_tokens = min(most_tokens, capacity_tokens, 512)
        if limit_s is not None and role.decodes:
            share = 1 - PREFILL_SHARE
            found = search_budget(
                lambda count: seconds(StepShape(num_decodes=count, context=block)),
                share * limit_s,
                1,
                min(num_seqs, capacity_tokens // block),
            )
            self._report("decodes", found, share * limit_s)
            num_seqs = found.size
        if limit_s is not None:
            unit = min(MIN_CHUNK, most_tokens)
            found = search_budget(
                lambda count: seconds(StepShape(chunks=_prompts(count * unit, longest))),
                limit_s,
                1,
                max(1, min(most_tokens, capacity_tokens) // unit),
            )
            self._report(f"prefills of {unit} tokens", found, limit_s)
            num_tokens = found.size * unit
        context = max(min(longest // 2, capacity_tokens // num_seqs) // block * block, block)
        for shape in _mixtures(num_tokens, num_seqs if role.decodes else 0, context, longest):
            if shape.num_blocks(block) <= capacity_tokens // block:
                seconds(shape)
        self._known.save()
        self._cost = fit_cost(samples)
        errors = sorted(abs(self._cost.seconds(work) / measured - 1) for work, measured in samples.items())
        logger.info("steps: %s, off by %.0f %% (median)", self._cost, 100 * errors[len(errors) // 2])
        if limit_s is not None:
            self.budget = Budget(
                max_num_tokens=max(num_tokens, num_seqs if role.decodes else 0),
                max_num_seqs=num_seqs,
                pace=StepPace(self._cost, limit_s),
            )
        return self.budget

    def _report(self, what: str, found: Found, limit_s: float) -> None:
        slo = "slo.tpot_ms" if self._options.role.decodes else "slo.ttft_ms times batching.alpha"
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
        """The order of the waiting queue; called under the engine's lock, as the pool is read."""

        def cached_tokens(sequence: Sequence) -> int:
            return min(len(pool.match(sequence.block_hashes)) * pool.block_size, sequence.num_prompt_tokens - 1)

        def prefill_s(sequence: Sequence) -> float:
            start = cached_tokens(sequence)
            count = sequence.num_prompt_tokens - start
            steps = math.ceil(count / self.budget.max_num_tokens)
            return steps * self._cost.base_s + self._cost.chunk_s(start, count)

        if self._options.batching_order == "sjf":
            return partial(sjf, uncached_tokens=lambda s: s.num_prompt_tokens - cached_tokens(s))
        if self._options.batching_order == "slack":
            assert self._ttft_s is not None, "slack needs slo_ttft_ms"
            return partial(slack, ttft_s=self._ttft_s, prefill_s=prefill_s)
        return fcfs

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Correct the prediction by a step that has just ended."""
        if self.budget.pace is not None and (output.prefills or not self._options.role.prefills):
            self.budget.pace.observe(work_done(output.decodes, output.prefills), seconds)

    def summary(self) -> dict[str, float]:
        """For /info."""
        pace = self.budget.pace
        return {
            "max_num_batched_tokens": self.budget.max_num_tokens,
            "max_num_seqs": self.budget.max_num_seqs,
            "image_budget_pixels": self.image_budget_pixels,
            **({} if self.limit_s is None else {"limit_ms": 1000 * self.limit_s}),
            **({} if pace is None else {"correction": pace.correction}),
        }


def measurements(options: InstanceOptions, device: Device, fingerprint: str) -> Measurements:
    """What is known of an instance like this one, in this user's cache.

    Args:
        fingerprint: of the model and the dtype.
    """
    about: dict[str, str | int | None] = {
        "role": str(options.role),  # instances of different roles start at once and measure different things
        "model": fingerprint,
        "device": f"{device.type} {device.description}",
        "ranks": len(options.devices),
        "threads": options.threads,
        "cores": device.cores,
        "share": None if options.share is None else f"{options.share:g}",
        "max_num_seqs": options.max_num_seqs,
        "block_size": options.tokens_per_block,
        "epd_serve": __version__,
        "torch": str(torch.__version__),
    }
    return Measurements(cache_dir(os.environ), about)


def fit_cost(samples: Mapping[StepWork, float]) -> StepCost:
    """The cost without negative parts that comes closest to measured seconds, in relative terms."""
    rows = [
        [1.0, work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs] for work in samples
    ]
    base_s, token_s, sequence_s, context_s, pair_s = fit_parts(rows, list(samples.values()))
    return StepCost(base_s=base_s, token_s=token_s, sequence_s=sequence_s, context_s=context_s, pair_s=pair_s)


def fit_parts(rows: AbstractSequence[AbstractSequence[float]], seconds: AbstractSequence[float]) -> list[float]:
    """Coefficients of sums over columns, none below zero, closest to ``seconds`` in relative terms."""
    relative = torch.tensor(rows, dtype=torch.float64) / torch.tensor(seconds)[:, None]
    scale = relative.abs().amax(0).clamp_min(1e-30)
    kept = [column for column in range(len(scale)) if relative[:, column].any()]
    while True:
        ones = torch.ones(len(rows), 1, dtype=torch.float64)
        part = torch.linalg.lstsq((relative / scale)[:, kept], ones, driver="gelsd").solution[:, 0]
        if (part >= 0).all():
            break
        del kept[int(part.argmin())]
    parts = [0.0] * len(scale)
    for column, value in zip(kept, (part / scale[kept]).tolist(), strict=True):
        parts[column] = value
    return parts


def _prompts(num_tokens: int, longest: int) -> tuple[tuple[int, int], ...]:
    """So many tokens as whole prompts."""
    return tuple((0, min(longest, num_tokens - start)) for start in range(0, num_tokens, longest))


def _mixtures(num_tokens: int, num_seqs: int, context: int, longest: int) -> list[StepShape]:
    """Steps that tell the parts of a step's cost apart, around those that fill it."""
    count = min(num_tokens, longest)
    half = max(count // 2, 1)
    start = min(4 * count, longest - count)
    shapes = [
        StepShape(chunks=((0, half),)),
        StepShape(chunks=((start, half),)),
        StepShape(chunks=((start, count),)),
        StepShape(chunks=((0, max(count // 8, 1)),) * 4),
    ]
    if num_seqs:
        some = max(num_seqs // 2, 1)
        shapes += [
            StepShape(num_decodes=some, context=context),
            StepShape(num_decodes=some, context=context, chunks=((0, half),)),
            StepShape(num_decodes=some, context=context, chunks=((start, max(half // 2, 1)),)),
        ]
    return shapes
