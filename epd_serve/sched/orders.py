"""The orders in which waiting sequences are admitted. Equals keep the order of the queue."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from epd_serve.cache.block_pool import BlockPool
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence
from epd_serve.sched.step_cost import StepCost

#: A sequence goes first after waiting for this many times TTFT_max.
PATIENCE = 4.0


class Order:
    """The order of ``batching.order``. Preempted sequences, which have output, always come first.

    * ``fcfs``: by arrival.
    * ``sjf``: fewest uncached prompt tokens first; long prompts can starve.
    * ``slack``: least remaining time until TTFT_max first, minus the sequence's own prefill. Late sequences come
      last, oldest first, so they delay no others; after ``PATIENCE * ttft_s`` they come first, so none starves.

    Args:
        cost: of steps within the budget.
        ttft_s: TTFT_max, for ``slack``.
    """

    def __init__(
        self, name: str, pool: BlockPool, budget: Budget, cost: StepCost, ttft_s: float | None = None
    ) -> None:
        assert name != "slack" or ttft_s is not None, "the order slack needs a limit on TTFT"
        self._name, self._pool, self._budget, self._cost = name, pool, budget, cost
        self._ttft_s = ttft_s or 0.0

    def sort(self, waiting: AbstractSequence[Sequence], now: float) -> list[Sequence]:
        """Return ``waiting`` in the order of admission at ``now`` (monotonic seconds).

        Reads the pool, so it needs the engine's lock.
        """
        return sorted(waiting, key=lambda sequence: self._rank(sequence, now))

    def _rank(self, sequence: Sequence, now: float) -> tuple[int, float]:
        if sequence.output_ids or self._name == "fcfs":
            return (0 if sequence.output_ids else 1), sequence.arrival_s
        block_size = self._pool.block_size
        start = len(self._pool.match(sequence.reusable_hashes(block_size))) * block_size
        count = sequence.num_prompt_tokens - start
        if self._name == "sjf":
            return 1, count
        waited = now - sequence.arrival_s
        if waited >= PATIENCE * self._ttft_s:
            return 1, sequence.arrival_s
        steps = -(-count // self._budget.max_num_tokens)
        left = self._ttft_s - waited - steps * self._cost.base_s - self._cost.chunk_s(start, count)
        return (2, left) if left >= 0 else (3, sequence.arrival_s)
