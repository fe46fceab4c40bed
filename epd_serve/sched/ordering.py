"""The order in which waiting sequences are admitted: pure functions of the queue and the time.

Each returns a permutation of ``waiting``. Preempted sequences come first in all of them, oldest first: clients
have seen the beginning of their answers. Among equals the order of the queue stays.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

from epd_serve.request import Sequence

#: A sequence that has waited for so many times TTFT_max goes before all that have not.
PATIENCE = 4.0


def was_preempted(sequence: Sequence) -> bool:
    return bool(sequence.output_ids)


def fcfs(waiting: AbstractSequence[Sequence], now: float) -> list[Sequence]:
    """First come, first served."""
    return sorted(waiting, key=lambda sequence: (not was_preempted(sequence), sequence.arrival_s))


def sjf(
    waiting: AbstractSequence[Sequence], now: float, *, uncached_tokens: Callable[[Sequence], int]
) -> list[Sequence]:
    """Shortest job first, by the prompt tokens that no cached prefix holds. Long prompts can starve under it."""

    def key(sequence: Sequence) -> tuple[bool, float]:
        if was_preempted(sequence):
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
        if was_preempted(sequence):
            return 0, sequence.arrival_s
        if waited >= PATIENCE * ttft_s:
            return 1, sequence.arrival_s
        left = ttft_s - waited - prefill_s(sequence)
        return (2, left) if left >= 0 else (3, sequence.arrival_s)

    return sorted(waiting, key=key)
