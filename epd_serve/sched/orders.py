"""The orders in which waiting sequences are admitted.

An order is a pure function of the queue and the time that returns a permutation of ``waiting``. Among equals the
order of the queue stays.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from functools import partial

from epd_serve.cache.block_pool import BlockPool
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence
from epd_serve.sched.step_cost import StepCost

#: The waiting sequences in the order in which they are to be admitted, at a time (monotonic seconds). Pure.
Order = Callable[[AbstractSequence[Sequence], float], list[Sequence]]
#: A sequence that has waited for so many times TTFT_max goes before all that have not.
PATIENCE = 4.0


def fcfs(waiting: AbstractSequence[Sequence], now: float) -> list[Sequence]:
    """First come, first served, behind those that have output: they were preempted."""
    return sorted(waiting, key=lambda sequence: (not sequence.output_ids, sequence.arrival_s))


def sjf(
    waiting: AbstractSequence[Sequence], now: float, *, uncached_tokens: Callable[[Sequence], int]
) -> list[Sequence]:
    """Shortest job first, by the prompt tokens that no cached prefix holds. Long prompts can starve under it."""

    def key(sequence: Sequence) -> tuple[bool, float]:
        if sequence.output_ids:
            return False, sequence.arrival_s
        return True, uncached_tokens(sequence)

    return sorted(waiting, key=key)


def slack(
    waiting: AbstractSequence[Sequence], now: float, *, ttft_s: float, prefill_s: Callable[[Sequence], float]
) -> list[Sequence]:
    """Least slack first: what is left of TTFT_max when ``prefill_s``, a sequence's own prefill, is taken off it.

    Those whose slack is used up come last, oldest first: one that is too late anyway shall not make others late.
    No one starves: who has waited ``PATIENCE * ttft_s`` comes before all but those who arrived still earlier.
    """

    def key(sequence: Sequence) -> tuple[int, float]:
        waited = now - sequence.arrival_s
        if sequence.output_ids:
            return 0, sequence.arrival_s
        if waited >= PATIENCE * ttft_s:
            return 1, sequence.arrival_s
        left = ttft_s - waited - prefill_s(sequence)
        return (2, left) if left >= 0 else (3, sequence.arrival_s)

    return sorted(waiting, key=key)


def order_of(name: str, pool: BlockPool, budget: Budget, cost: StepCost, ttft_s: float | None) -> Order:
    """The order of ``batching.order``; called under the engine's lock, as the pool is read.

    Args:
        cost: of steps within the budget. ttft_s: TTFT_max, which the order ``slack`` needs.
    """

    def cached_tokens(sequence: Sequence) -> int:
        return len(pool.match(sequence.reusable_hashes(pool.block_size))) * pool.block_size

    def prefill_s(sequence: Sequence) -> float:
        start = cached_tokens(sequence)
        count = sequence.num_prompt_tokens - start
        steps = -(-count // budget.max_num_tokens)
        return steps * cost.base_s + cost.chunk_s(start, count)

    if name == "sjf":
        return partial(sjf, uncached_tokens=lambda s: s.num_prompt_tokens - cached_tokens(s))
    if name == "slack":
        assert ttft_s is not None, "the order slack needs a limit on TTFT"
        return partial(slack, ttft_s=ttft_s, prefill_s=prefill_s)
    return fcfs
