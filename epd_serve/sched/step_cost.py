"""Budgets from SLOs (TriInfer, Algorithm 1, lines 1 to 5): how long a step may take, and how much fits in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from epd_serve.sched.sequence import Sequence
from epd_serve.types import Role

#: Of a step's limit: what a prefill gets even where decodes leave less, so that they cannot starve it.
PREFILL_SHARE = 0.1
#: The least that is prefilled in a step, however little time it leaves.
MIN_CHUNK = 16
_GAIN = 0.1
#: A request passes two steps at least, an encode and a prefill, before its first token.
_ALPHA = 0.5


def latency_limit_s(role: Role, *, ttft_s: float | None, tpot_s: float | None) -> float | None:
    """Return LATENCY_max of a role: TPOT_max where it decodes, else alpha * TTFT_max; None: no limit."""
    if role.decodes:
        return tpot_s
    return None if ttft_s is None else _ALPHA * ttft_s


def search_budget(measure: Callable[[int], float], limit_s: float, low: int, high: int) -> tuple[int, float]:
    """Return the largest size among ``low`` ... ``high`` whose time is within the limit, and that time.

    Doubles until a size misses the limit, as a much larger one would take much longer to measure; then bisects.
    Time is taken to grow with size, so that nothing beyond a miss is tried. ``low`` alone can miss the limit.
    """
    best, best_s = low, measure(low)
    missed = high + 1 if best_s <= limit_s else low + 1
    while missed - best > 1:
        size = min(2 * best, high) if missed > high else (best + missed) // 2
        if (seconds := measure(size)) <= limit_s:
            best, best_s = size, seconds
        else:
            missed = size
    return best, best_s


class StepWork(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The quantities that decide a step's time.

    Attributes:
        decode_context: tokens that the decodes read, their own included.
        prefill_pairs: for each chunk, its tokens times the tokens up to its end.
    """

    num_tokens: int = 0
    num_sequences: int = 0
    decode_context: int = 0
    prefill_pairs: int = 0

    @classmethod
    def of(cls, decode_contexts: Iterable[int], chunks: Iterable[tuple[int, int]]) -> StepWork:
        """Return the work of decodes with these contexts and of chunks of (first token, number of tokens)."""
        contexts, chunks = list(decode_contexts), list(chunks)
        return cls(
            num_tokens=len(contexts) + sum(count for _, count in chunks),
            num_sequences=len(contexts) + len(chunks),
            decode_context=sum(contexts),
            prefill_pairs=sum(count * (start + count) for start, count in chunks),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds of a step as a sum over its work. All coefficients are zero or more."""

    base_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return (
            self.base_s
            + self.token_s * work.num_tokens
            + self.sequence_s * work.num_sequences
            + self.context_s * work.decode_context
            + self.pair_s * work.prefill_pairs
        )

    def decode_s(self, context: int) -> float:
        """Seconds that one more decode adds to a step."""
        return self.token_s + self.sequence_s + self.context_s * context

    def chunk_s(self, start: int, count: int) -> float:
        """Seconds that one more chunk adds to a step."""
        return self.sequence_s + self.token_s * count + self.pair_s * count * (start + count)

    def tokens_within(self, seconds: float, start: int) -> float:
        """The longest chunk from token ``start`` on that adds no more than ``seconds``; may be infinite."""
        rest = seconds - self.sequence_s
        linear = self.token_s + self.pair_s * start
        if rest <= 0:
            return 0
        root = linear + math.sqrt(linear * linear + 4 * self.pair_s * rest)
        return math.inf if not root else 2 * rest / root


class StepMeter:
    """The seconds and prompt tokens left in one step: ``num_tokens``, or where there are decodes ``num_beside``.

    Decodes always fit; the first chunk gets its share even if they leave less.
    """

    def __init__(self, cost: StepCost, limit_s: float, num_tokens: int, num_beside: int) -> None:
        self._cost = cost
        self._left_s = limit_s - cost.base_s
        self._share_s = PREFILL_SHARE * limit_s
        self._least = MIN_CHUNK
        self._num_tokens = num_tokens
        self._num_beside = num_beside

    def take_decode(self, context: int) -> None:
        self._num_tokens = self._num_beside
        self._left_s -= self._cost.decode_s(context)

    def take_chunk(self, start: int, count: int) -> int:
        """Take a chunk of up to ``count`` tokens from ``start`` on; return the number of tokens that had room."""
        seconds, count = max(self._left_s, self._share_s), max(min(count, self._num_tokens), 0)
        count = min(count, max(self._least, int(min(self._cost.tokens_within(seconds, start), count))))
        if count:
            self._left_s = seconds - self._cost.chunk_s(start, count)
            self._share_s, self._least = 0.0, 0
            self._num_tokens -= count
        return count


class StepPace:
    """The time that a step may take by the cost model, corrected by the times of past steps.

    The correction is a moving average of (observed / predicted) over steps with prefills, whose length is what can
    be chosen, plus twice its mean deviation: most steps shall end within the limit, not half of them.
    """

    def __init__(self, cost: StepCost, limit_s: float) -> None:
        self.cost = cost
        self.limit_s = limit_s
        self._ratio = 1.0
        self._deviation = 0.0

    @property
    def correction(self) -> float:
        return self._ratio + 2 * self._deviation

    def meter(self) -> StepMeter:
        return StepMeter(self.cost, self.limit_s / self.correction, sys.maxsize, sys.maxsize)

    def has_room(self, num_decodes: int, context: int, num_tokens: int) -> bool:
        """Return whether one more sequence may join those that decode here, and read ``context`` tokens together.

        A step of all of them has to leave a prefill its share. A sequence that is alone has room.
        """
        together = StepWork(
            num_tokens=num_decodes + 1, num_sequences=num_decodes + 1, decode_context=context + num_tokens
        )
        limit_s = (1 - PREFILL_SHARE) * self.limit_s / self.correction
        return not num_decodes or self.cost.seconds(together) <= limit_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step with prefills. A single outlier counts as four times too long at most."""
        predicted = self.cost.seconds(work)
        if predicted > 0:
            ratio = min(max(seconds / predicted, 0.25), 4.0)
            self._deviation += _GAIN * (abs(ratio - self._ratio) - self._deviation)
            self._ratio += _GAIN * (ratio - self._ratio)


#: A step's time where no SLO says another: decodes go on twice a second, however long the prompts beside them.
TARGET_S = 0.5
_MOST_CHANGE = 4


class ChunkPace:
    """The prompt tokens beside decodes that take about ``TARGET_S``, by the times of the steps before.

    Without decodes nobody waits for the step, and each chunk reads all weights and the context before it: small
    ones would take several times as long together. A chunk beside decodes is made smaller at once where a step has
    taken longer, and larger where it was full and took less, in each step by a factor of ``_MOST_CHANGE`` at most:
    one step may compile, or wait for a core.

    Args:
        num_alone: prompt tokens of a step without decodes, at least.

    Attributes:
        num_tokens: of the next chunk beside decodes, ``MIN_CHUNK`` or more.
    """

    def __init__(self, num_tokens: int, num_alone: int) -> None:
        self.num_tokens = num_tokens
        self._num_alone = num_alone
        self._decode_s = 0.0

    def meter(self) -> StepMeter:
        """Return the meter of one step: its time costs nothing."""
        return StepMeter(StepCost(), 1.0, max(self._num_alone, self.num_tokens), self.num_tokens)

    def has_room(self, num_decodes: int, context: int, num_tokens: int) -> bool:
        """Whether one more sequence may join: always, within the budget's other limits."""
        return True

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a step with this number of prompt tokens."""
        if not num_prefill_tokens:
            self._decode_s = seconds
            return
        target_s = max(TARGET_S - self._decode_s, PREFILL_SHARE * TARGET_S)
        chunk_s = max(seconds - self._decode_s, PREFILL_SHARE * seconds)
        fitting = num_prefill_tokens * target_s / chunk_s
        if chunk_s > target_s:
            least = max(self.num_tokens // _MOST_CHANGE, MIN_CHUNK)
            self.num_tokens = max(min(int(fitting), self.num_tokens), least)
        elif num_prefill_tokens >= self.num_tokens:
            self.num_tokens = max(min(int(fitting), _MOST_CHANGE * self.num_tokens), self.num_tokens)


#: The pace of a budget without one.
NO_LIMIT = ChunkPace(sys.maxsize, sys.maxsize)


def work_done(decodes: Iterable[Sequence], prefills: Iterable[tuple[Sequence, int]]) -> StepWork:
    """The work of a step that has just ended: its chunks are counted as computed, its decodes' tokens appended."""
    return StepWork.of(
        (sequence.num_tokens - 1 for sequence in decodes),
        ((sequence.num_computed - count, count) for sequence, count in prefills),
    )
