"""Token ids to text, piece by piece, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_CONTEXT_TOKENS = 6
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Text of one sequence as it grows.

    Bytes that do not yet make a character, and text that may be the beginning of a stop string, are held back
    until the next tokens decide. The state follows from the tokens alone: an instance that pushes the same tokens
    stands where the one before it stood.

    Args:
        min_tokens: a stop string that is complete within so many tokens stops nothing, as in vLLM.
        include_stop: whether the stop string stays in the text.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._stop = tuple(stop)
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._shown = len(self._ids)  # tokens whose text is out
        self._context = 0  # first token that is decoded again, since merging across tokens can change spaces
        self._held = ""
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.text = ""
        self.stopped = False

    @property
    def num_read(self) -> int:
        """Characters so far, those that may begin a stop string included."""
        return len(self.text) + len(self._held)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain. Sets ``stopped`` when a stop string is complete."""
        self._num_tokens += 1
        self._ids.append(token_id)
        before = self._decode(self._context, self._shown)
        after = self._decode(self._context, len(self._ids))
        if self._skip and after == before and not self._decode(len(self._ids) - 1, len(self._ids)):
            self._ids.pop()  # a token that is not shown: a run of them must not be decoded again and again
            return ""
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._emit(after[len(before) :])

    def flush(self) -> str:
        """All that was held back; for the end of a generation."""
        rest = self._decode(self._context, len(self._ids))[len(self._decode(self._context, self._shown)) :]
        self._shown = len(self._ids)
        text = self._emit(rest) + ("" if self.stopped else self._held)
        if not self.stopped:
            self.text += self._held
        self._held = ""
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._decoder.decode(self._ids[start:end], skip_special_tokens=self._skip) if end > start else ""

    def _emit(self, new: str) -> str:
        pending = self._held + new
        stops = self._stop if self._num_tokens > self._min_tokens else ()
        found = [(index, -len(stop)) for stop in stops if (index := pending.find(stop)) >= 0]
        if found:
            start, length = min(found)
            pending = pending[: start - length if self._include_stop else start]
            self._held, self.stopped = "", True
        else:
            keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
            self._held = pending[len(pending) - keep :]
            pending = pending[: len(pending) - keep]
        self.text += pending
        return pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
