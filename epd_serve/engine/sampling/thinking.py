"""Token masks for answers that begin with thinking."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from epd_serve.engine.sampling.grammar import MatcherConstraint
from epd_serve.types import Thinking


class ThinkingConstraint:
    """Leaves thinking free up to its budget and applies the grammar to the answer after it. Used by one thread.

    Attributes:
        error: the grammar's error.
    """

    def __init__(
        self,
        thinking: Thinking,
        budget: int | None,
        grammar: MatcherConstraint | None,
        num_tokens: int,
        ends: Collection[int],
    ) -> None:
        """``budget``: maximum tokens of thinking. ``num_tokens``: vocabulary size.

        ``ends``: tokens that end an answer, forbidden during thinking before a structured answer.
        """
        self._thinking, self._budget, self._grammar = thinking, budget, grammar
        self._num_tokens, self._ends = num_tokens, ends
        self._in_thought, self._after_thought = self._all_but(ends), self._all_but(())
        self._is_open = thinking.is_open
        self._num_thought = 0
        self._num_seen = 0
        self._begin = 0  # the first token of the answer

    @property
    def error(self) -> str:
        return "" if self._grammar is None else self._grammar.error

    def allowed(self, output_ids: Sequence[int]) -> NDArray[np.int32]:
        """As :meth:`MatcherConstraint.allowed`."""
        thinking = self._thinking
        for place in range(self._num_seen, len(output_ids)):
            if self._is_open:
                self._is_open = output_ids[place] != thinking.end_id
                self._num_thought += self._is_open
                self._begin = place + 1 + len(thinking.after_ids)
            elif place == 0:
                self._is_open = output_ids[0] == thinking.start_id
        self._num_seen = num_seen = len(output_ids)
        if self._is_open:
            is_over = self._budget is not None and self._num_thought >= self._budget
            return self._only(thinking.end_id) if is_over else self._in_thought
        if num_seen < self._begin:
            return self._only(thinking.after_ids[num_seen - self._begin])
        if self._grammar is None:
            return self._after_thought
        allowed = self._grammar.allowed(output_ids[self._begin :])
        return allowed if num_seen else allowed | self._only(thinking.start_id)

    def fork(self) -> ThinkingConstraint:
        """Return a copy of the state for another choice, before its first token."""
        grammar = None if self._grammar is None else self._grammar.fork()
        return ThinkingConstraint(self._thinking, self._budget, grammar, self._num_tokens, self._ends)

    def _all_but(self, tokens: Collection[int]) -> NDArray[np.int32]:
        row = np.full((self._num_tokens + 31) // 32, -1, np.int32)
        for token in tokens:
            row &= ~self._only(token)
        return row

    def _only(self, token: int) -> NDArray[np.int32]:
        row = np.zeros((self._num_tokens + 31) // 32, np.uint32)
        row[token // 32] = 1 << token % 32
        return row.view(np.int32)
