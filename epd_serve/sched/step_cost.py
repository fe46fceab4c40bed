"""Step budgets from SLOs (TriInfer, Algorithm 1, lines 1 to 5): how long a step may take and what fits in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable

import msgspec

from epd_serve.cost.profile import Line
from epd_serve.sched.sequence import Sequence
from epd_serve.types import Role

#: Least share of a step's time limit for a prefill, so that decodes cannot starve it.
PREFILL_SHARE = 0.1
#: Least tokens of a step's first chunk.
MIN_CHUNK = 16
_GAIN = 0.1
#: TTFT spans at least two steps, an encode and a prefill.
_ALPHA = 0.5


def latency_limit_s(role: Role, *, ttft_s: float | None, tpot_s: float | None) -> float | None:
    """Return LATENCY_max of a role: TPOT_max if it decodes, else alpha * TTFT_max; None without an SLO."""
    if role.decodes:
        return tpot_s
    return None if ttft_s is None else _ALPHA * ttft_s


def search_budget(measure: Callable[[int], float], limit_s: float, high: int) -> tuple[int, float]:
    """Return the largest size up to ``high`` whose time is within the limit, and that time.

    Doubles until a size misses the limit, then bisects, so that no much larger size is measured. Assumes that time
    grows with size. 1 is returned even if it misses.
    """
    best, best_s = 1, measure(1)
    missed = high + 1 if best_s <= limit_s else 2
    while missed - best > 1:
        size = min(2 * best, high) if missed > high else (best + missed) // 2
        if (seconds := measure(size)) <= limit_s:
            best, best_s = size, seconds
        else:
            missed = size
    return best, best_s


class StepWork(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The quantities that determine a step's time.

    Attributes:
        decode_context: tokens that the decodes attend to, their own included.
        prefill_pairs: sum over chunks of their tokens times the tokens up to their end.
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


class StepCost(Line, frozen=True, kw_only=True):
    """A model of a step's seconds with non-negative coefficients."""

    def step_s(self, work: StepWork) -> float:
        return self.seconds(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs)

    def decode_s(self, context: int) -> float:
        """Return the seconds that a decode adds to a step."""
        return self.token_s + self.sequence_s + self.context_s * context

    def chunk_s(self, start: int, count: int) -> float:
        """Return the seconds that a chunk adds to a step."""
        return self.sequence_s + self.token_s * count + self.pair_s * count * (start + count)

    def tokens_within(self, seconds: float, start: int) -> float:
        """Return the tokens of the longest chunk from ``start`` that adds at most ``seconds``; may be infinite."""
        rest = seconds - self.sequence_s
        linear = self.token_s + self.pair_s * start
        if rest <= 0:
            return 0
        root = linear + math.sqrt(linear * linear + 4 * self.pair_s * rest)
        return math.inf if not root else 2 * rest / root


class StepMeter:
    """The seconds and prompt tokens left in a step: ``num_tokens``, or ``num_beside`` with decodes.

    Decodes always fit; the first chunk gets a least share.
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
        """Take a chunk of up to ``count`` tokens from ``start``; return how many fit."""
        seconds, count = max(self._left_s, self._share_s), max(min(count, self._num_tokens), 0)
        count = min(count, max(self._least, int(min(self._cost.tokens_within(seconds, start), count))))
        if count:
            self._left_s = seconds - self._cost.chunk_s(start, count)
            self._share_s, self._least = 0.0, 0
            self._num_tokens -= count
        return count


class StepPace:
    """The time limit of steps, by a cost model that measured times correct.

    The correction is a moving average of observed / predicted over steps with prefills, plus twice its mean
    deviation, so that most steps stay within the limit.
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
        """Return whether a sequence may join ``num_decodes`` others, which attend to ``context`` tokens together.

        A step of all decodes must leave a prefill its share. A sequence alone always has room.
        """
        together = StepWork(
            num_tokens=num_decodes + 1, num_sequences=num_decodes + 1, decode_context=context + num_tokens
        )
        limit_s = (1 - PREFILL_SHARE) * self.limit_s / self.correction
        return not num_decodes or self.cost.step_s(together) <= limit_s

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step with prefills; outliers are clipped to a factor of 4."""
        predicted = self.cost.step_s(work)
        if predicted > 0:
            ratio = min(max(seconds / predicted, 0.25), 4.0)
            self._deviation += _GAIN * (abs(ratio - self._ratio) - self._deviation)
            self._ratio += _GAIN * (ratio - self._ratio)


#: Time of a step without an SLO, so that decodes advance twice a second next to long prompts.
TARGET_S = 0.5
_MOST_CHANGE = 4


class ChunkPace:
    """Adapts the prompt tokens of a step with decodes so that it takes about ``TARGET_S``; decodes are unlimited.

    The chunk shrinks after a slower step and grows after a faster, full one, by a factor of at most
    ``_MOST_CHANGE``, as a single step may compile or wait for a core. Without decodes a chunk is large: each one
    reads all weights and the context before it.

    Args:
        num_alone: minimum prompt tokens of a step without decodes.

    Attributes:
        num_tokens: prompt tokens of the next step with decodes, at least ``MIN_CHUNK``.
    """

    def __init__(self, num_tokens: int, num_alone: int) -> None:
        self.num_tokens = num_tokens
        self._num_alone = num_alone
        self._decode_s = 0.0

    def meter(self) -> StepMeter:
        """Return the meter of one step, which limits tokens, not time."""
        return StepMeter(StepCost(), 1.0, max(self._num_alone, self.num_tokens), self.num_tokens)

    def has_room(self, num_decodes: int, context: int, num_tokens: int) -> bool:
        return True

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a step."""
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
    """Return the work of a finished step, whose tokens are already counted and appended."""
    return StepWork.of(
        (sequence.num_tokens - 1 for sequence in decodes),
        ((sequence.num_computed - count, count) for sequence, count in prefills),
    )
