"""The tokenizer for texts of strangers: what cannot fit is refused unread, and the rest is read piece by piece.

A tokenizer takes about 200 bytes of memory and a microsecond for each character, and cannot be stopped. A text is
cut where it provably makes no difference: behind a letter or digit and before a space or line break (in Chinese,
Japanese and Korean also before their punctuation). The regular expressions that split the text of the known
byte-level BPEs (GPT-2, Llama 3, Qwen) end a match at each such place, look neither behind a match nor beyond its
end there, and no merge crosses it. Texts of any other tokenizer are read in one piece.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from epd_serve.errors import InvalidRequest

#: Characters of a piece, about: some hundredths of a second.
PIECE_CHARACTERS = 16 * 1024
#: Characters without a place to cut: 200 MB while they are read.
MAX_UNCUT_CHARACTERS = 1 << 20
#: Longer ones are read by a second tokenizer, so that nobody waits for the first.
_LONG_PIECE_CHARACTERS = 4 * PIECE_CHARACTERS
#: Characters that a normalizer makes one of.
_MAX_COMPOSED = 4
#: Between two pieces, so that others get the tokenizer.
_PAUSE_S = 0.0001

_CUT = re.compile(
    r"[A-Za-z0-9](?=[ \n])"
    r"|[\u4e00-\u9fa5\u3041-\u3096\u30a1-\u30fa\uac00-\ud7a3](?=[ \n\u3001\u3002\uff01\uff0c\uff1f])"
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Those of Llama 3 and of Qwen.
_KNOWN_SPLITS = frozenset((_WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"))


def _nobody() -> None:
    """Never raise: a caller's default, who always waits."""


class BoundedTokenizer:
    """Reads texts with one tokenizer. Safe for use from several threads.

    Attributes:
        longest: characters that a token stands for at most.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._spare: Any = None
        self._spare_lock = threading.Lock()
        self._affixes = _affixes(tokenizer) if _can_be_cut(tokenizer) else None
        self.longest = max(map(len, tokenizer.get_vocab()))
        if self._affixes is None or tokenizer.backend_tokenizer.normalizer is not None:
            self.longest *= _MAX_COMPOSED

    def check_length(self, num_characters: int, max_tokens: int, param: str) -> None:
        """Raises InvalidRequest for a text that has more tokens, whatever it says."""
        if num_characters > max_tokens * self.longest:
            raise InvalidRequest(
                f"the prompt has {num_characters} characters; the context holds {max_tokens} tokens of at most "
                f"{self.longest} characters each; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        max_tokens: int,
        split_special_tokens: bool = False,
        check: Callable[[], None] = _nobody,
    ) -> list[int]:
        """The ids of the tokenizer's own ``encode``, or its first ones where there are more than ``max_tokens``.

        Args:
            check: called now and then; what it raises ends the work.

        Raises InvalidRequest for a text that would take too much memory.
        """
        ids: list[int] = []
        if len(text) <= PIECE_CHARACTERS or self._affixes is None:
            check()
            return self._read(text, add_special_tokens, split_special_tokens)
        before, after = self._affixes if add_special_tokens else ([], [])
        ids += before
        for start, end in self._pieces(text):
            check()
            ids += self._read(text[start:end], False, split_special_tokens)
            if len(ids) > max_tokens:
                return ids
            time.sleep(_PAUSE_S)
        return ids + after

    def last(
        self, text: str, num_tokens: int, *, add_special_tokens: bool, check: Callable[[], None] = _nobody
    ) -> list[int]:
        """As many of the last ids of :meth:`encode`. Raises as it does."""
        if len(text) <= PIECE_CHARACTERS or self._affixes is None:
            check()
            _check_uncut(len(text))
            return self._read(text, add_special_tokens, False)[-num_tokens:]
        before, after = self._affixes if add_special_tokens else ([], [])
        read, count = [after], len(after)
        for start, end in reversed(list(self._pieces(text))):
            if count >= num_tokens:
                break
            check()
            read.append(self._read(text[start:end], False, False))
            count += len(read[-1])
            time.sleep(_PAUSE_S)
        return [token for ids in (before, *reversed(read)) for token in ids][-num_tokens:]

    def _pieces(self, text: str) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(text):
            found = _CUT.search(text, start + PIECE_CHARACTERS)
            end = len(text) if found is None else found.end()
            _check_uncut(end - start)
            yield start, end
            start = end

    def _read(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> list[int]:
        options = {"add_special_tokens": add_special_tokens, "split_special_tokens": split_special_tokens}
        if len(text) <= _LONG_PIECE_CHARACTERS:
            with self._lock:  # its options are the tokenizer's state
                ids: list[int] = self._tokenizer.encode(text, **options)
            return ids
        with self._spare_lock:
            if self._spare is None:
                with self._lock:
                    self._spare = copy.deepcopy(self._tokenizer)
            read: list[int] = self._spare.encode(text, **options)
        return read


def _check_uncut(num_characters: int) -> None:
    if num_characters > MAX_UNCUT_CHARACTERS:
        raise InvalidRequest(
            f"the prompt has {num_characters} characters without a place where the tokenizer may pause: a space "
            f"or line break behind a word; at most {MAX_UNCUT_CHARACTERS} are read at once",
            param="prompt",
            code="context_length_exceeded",
        )


def _can_be_cut(tokenizer: Any) -> bool:
    """Whether the proof above holds."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    spec = json.loads(backend.to_str())
    added = tokenizer.added_tokens_decoder.values()
    return (
        spec["model"]["type"] == "BPE"
        and not spec["model"].get("dropout")
        and _steps(spec["normalizer"], "normalizers") in ([], [{"type": "NFC"}])
        and _ends_at_words(_steps(spec["pre_tokenizer"], "pretokenizers"))
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        and not any(_CUT.search(str(token.content)) for token in added)
    )


def _steps(spec: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    return list(spec[name]) if spec["type"] == "Sequence" else [spec]


def _ends_at_words(steps: list[dict[str, Any]]) -> bool:
    splits = False
    for step in steps:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            splits = splits or bool(step.get("use_regex", True))
        elif step["type"] == "Split":
            if (
                step["pattern"].get("Regex") not in _KNOWN_SPLITS
                or step["behavior"] != "Isolated"
                or step["invert"]
            ):
                return False
            splits = True
        elif step["type"] != "Digits":
            return False
    return splits


def _affixes(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Return the tokens that are added before and behind each text; None where anything else is done."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return None
