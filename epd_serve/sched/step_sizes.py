"""The step budget within a latency limit, from steps timed before an instance serves.

An instance times real steps; the simulator takes the times from a profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epd_serve.cost.least_squares import fit_relative
from epd_serve.sched.schedule import Budget
from epd_serve.sched.step_cost import MIN_CHUNK, PREFILL_SHARE, StepCost, StepPace, StepWork, search_budget


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """A step to measure: decodes, and chunks of prompts, each (first token, tokens).

    Attributes:
        context: mean context of the decodes, in tokens.
        spread: relative deviation of the contexts, which are evenly spaced, the longest first.
    """

    num_decodes: int = 0
    context: int = 1
    chunks: tuple[tuple[int, int], ...] = ()
    spread: float = 0.0

    @property
    def contexts(self) -> list[int]:
        count = self.num_decodes
        places = (1 - (2 * number + 1) / count for number in range(count))
        return [round(self.context * (1 + self.spread * place)) for place in places]

    @property
    def work(self) -> StepWork:
        return StepWork.of(self.contexts, self.chunks)

    def num_blocks(self, block_size: int) -> int:
        lengths = self.contexts + [start + count for start, count in self.chunks]
        return sum(-(-length // block_size) for length in lengths)

    def __str__(self) -> str:
        decodes = f"{self.num_decodes}x{self.context}" + (f"~{self.spread:g}" if self.spread else "")
        return " ".join([decodes, *(f"{start}+{count}" for start, count in self.chunks)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds of an instance's steps. ``latency_s`` is LATENCY_max, None to fit only the cost."""

    latency_s: float | None
    decodes: bool
    max_num_tokens: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def capacity(self) -> int:
        """Tokens in the KV pool."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def chunk(self) -> int:
        """Prefills are tried in multiples of this many tokens."""
        return min(MIN_CHUNK, self.max_num_tokens)

    @property
    def decode_s(self) -> float | None:
        """Limit of a step of decodes alone, which leaves a prefill its share."""
        return None if self.latency_s is None else (1 - PREFILL_SHARE) * self.latency_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The budget of an instance's steps, without a pace if unlimited, and the measurements behind it.

    ``decodes`` and ``prefills`` are (size, seconds), in sequences and in chunks of ``Limits.chunk`` tokens.
    """

    budget: Budget
    cost: StepCost
    decodes: tuple[int, float] | None
    prefills: tuple[int, float] | None


def size_steps(measure: Callable[[StepShape], float], limits: Limits) -> Sizes:
    """Find the most decodes (with contexts of one block) and the most prompt tokens of a step, each alone.

    The cost is fitted to these and to mixed steps. ``measure`` returns infinity when its time is up.
    """
    samples: dict[StepWork, float] = {}

    def seconds(shape: StepShape) -> float:
        if (measured := measure(shape)) < math.inf:
            samples[shape.work] = measured
        return measured

    block, capacity, latency_s = limits.block_size, limits.capacity, limits.latency_s
    longest = max(min(limits.max_model_len, capacity) // block * block, block)
    num_tokens, num_seqs = min(limits.max_num_tokens, capacity, 512), limits.max_num_seqs
    decodes = prefills = None
    if limits.decode_s is not None and limits.decodes:
        most = max(min(num_seqs, capacity // block), 1)
        decodes = search_budget(
            lambda count: seconds(StepShape(num_decodes=count, context=block)), limits.decode_s, most
        )
        num_seqs = decodes[0]
    if latency_s is not None:
        unit = limits.chunk
        most = max(1, min(limits.max_num_tokens, capacity) // unit)
        prefills = search_budget(
            lambda count: seconds(StepShape(chunks=prompts_of(count * unit, longest))), latency_s, most
        )
        num_tokens = prefills[0] * unit
    context = max(min(longest // 2, capacity // num_seqs) // block * block, block)
    for shape in _mixtures(num_tokens, num_seqs if limits.decodes else 0, context, longest):
        if shape.num_blocks(block) <= capacity // block:
            seconds(shape)
    cost = fit_cost(samples)
    budget = Budget(max_num_tokens=limits.max_num_tokens, max_num_seqs=limits.max_num_seqs)
    if latency_s is not None:
        most = max(num_tokens, num_seqs if limits.decodes else 0)
        budget = Budget(max_num_tokens=most, max_num_seqs=num_seqs, pace=StepPace(cost, latency_s))
    return Sizes(budget=budget, cost=cost, decodes=decodes, prefills=prefills)


def prompts_of(num_tokens: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Return ``num_tokens`` tokens as whole prompts of at most ``longest``."""
    return tuple((0, min(longest, num_tokens - start)) for start in range(0, num_tokens, longest))


def _mixtures(num_tokens: int, num_seqs: int, context: int, longest: int) -> list[StepShape]:
    """Return mixed steps from which the coefficients of the cost can be fitted."""
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


def fit_cost(samples: Mapping[StepWork, float]) -> StepCost:
    """Return the cost with the least relative error against measured seconds, without negative parts."""
    rows = [
        [1.0, work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs] for work in samples
    ]
    base_s, token_s, sequence_s, context_s, pair_s = fit_relative(rows, list(samples.values()))
    return StepCost(base_s=base_s, token_s=token_s, sequence_s=sequence_s, context_s=context_s, pair_s=pair_s)
