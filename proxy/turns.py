"""Large bodies are read a few at a time, so that few are held in part.

Read all at once, each would take as long as all together, and the memory of all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Smaller ones are read as they come.
LARGE_BYTES = 64 * 1024


class Turns:
    """Of one event loop.

    Args:
        max_bytes: while there are so many in turns that have not ended, no other one begins ...
        patience_s: ... for so long: a client that sends slowly does not hold up the others.
    """

    def __init__(self, max_bytes: int = 8 << 20, patience_s: float = 0.1) -> None:
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._num_bytes = 0
        self._waiting: dict[Turn, asyncio.TimerHandle] = {}  # the oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """In turns that have begun and not ended."""
        return self._num_bytes

    def ask(self, loop: asyncio.AbstractEventLoop, nbytes: int, on_begin: Callable[[], None]) -> Turn:
        """A turn for ``nbytes``, which must be ended. ``on_begin`` is called unless it has begun already."""
        turn = Turn(self, nbytes, on_begin)
        if self._num_bytes < self._max_bytes:
            turn.has_begun = True
            self._num_bytes += nbytes
        else:
            self._waiting[turn] = loop.call_later(self._patience_s, self._begin, turn)
        return turn

    def end(self, turn: Turn) -> None:
        """Whether it has begun or not; once."""
        if turn.has_begun:
            self._num_bytes -= turn.nbytes
        else:
            self._waiting.pop(turn).cancel()
        while self._waiting and self._num_bytes < self._max_bytes:
            self._begin(next(iter(self._waiting)))

    def _begin(self, turn: Turn) -> None:
        self._waiting.pop(turn).cancel()
        turn.has_begun = True
        self._num_bytes += turn.nbytes
        turn.on_begin()


class Turn:
    """See :meth:`Turns.ask`."""

    __slots__ = ("has_begun", "nbytes", "on_begin", "turns")

    def __init__(self, turns: Turns, nbytes: int, on_begin: Callable[[], None]) -> None:
        self.turns = turns
        self.nbytes = nbytes
        self.on_begin = on_begin
        self.has_begun = False

    def end(self) -> None:
        self.turns.end(self)
