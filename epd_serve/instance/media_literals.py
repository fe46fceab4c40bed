"""Texts that spell a token which stands for media: they are text, and never a place for a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from epd_serve.errors import InvalidRequest

#: Names of a configuration's fields that say which tokens these are.
_FIELD = re.compile(r"(image|video|vision|audio)\w*_token_(id|index)")


class MediaLiterals:
    """Finds such spellings in what a request brings, and marks them, to be tokenised as the characters they are.

    A mark is a character of the private use areas that the request does not have, behind the first character of
    each spelling. Chat templates pass it on like any other.
    """

    def __init__(self, tokenizer: Any, config: Any) -> None:
        added = tokenizer.added_tokens_decoder
        fields = config.to_dict().items()
        ids = {value for name, value in fields if _FIELD.fullmatch(name) and isinstance(value, int)}
        spellings = [str(added[token_id].content) for token_id in ids if token_id in added]
        self._spelling = _any_of(spellings)
        self._special = _any_of(str(token.content) for token in added.values() if token.special)

    def mark_for(self, value: Any) -> str:
        """The mark for strings, lists and dicts of a request; "" where nothing in them is to be marked."""
        texts = list(_strings(value))
        if self._spelling is None or not any(map(self._spelling.search, texts)):
            return ""
        used: set[str] = set().union(*texts)
        mark = next((mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in used), None)
        if mark is None:
            raise InvalidRequest(
                f"a text that has {self._spelling.pattern!r} may not have every character from U+E000 to U+F8FF",
                param="messages",
            )
        return mark

    def marked(self, value: Any, mark: str) -> Any:
        """A copy of strings, lists and dicts with all spellings marked."""
        if isinstance(value, str):
            assert self._spelling is not None
            return self._spelling.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(one, mark) for key, one in value.items()}
        return [self.marked(one, mark) for one in value] if isinstance(value, list) else value

    def pieces(self, text: str, mark: str) -> Iterator[tuple[str, bool]]:
        """A text with marks in pieces to tokenise one by one, and whether special tokens are text in each.

        What lies between two special tokens is tokenised by itself, as a tokenizer does.
        """
        specials = () if self._special is None else self._special.finditer(text)
        pieces: list[str] = []  # such stretches in turn with what goes before and between them
        start = plain_from = 0
        for end, after in (*(found.span() for found in specials), (len(text), len(text))):
            if mark in text[start:end]:
                pieces += [text[plain_from:start], text[start:end].replace(mark, "")]
                plain_from = end
            start = after
        for place, piece in enumerate((*pieces, text[plain_from:])):
            yield piece, place % 2 == 1


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _strings(key)
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """The longest first; None where there are none."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
