"""Tokenizer of a model, and incremental detokenization of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from epd_serve.errors import InvalidRequest

#: Reject longer texts unless the context holds as many characters at _CHARACTERS_PER_TOKEN: a tokenizer takes
#: about 200 bytes and a microsecond per character, and cannot be interrupted.
MAX_CHARACTERS = 1 << 20
_CHARACTERS_PER_TOKEN = 8
#: Maximum characters that a normalizer composes into one.
_MAX_COMPOSED = 4
#: Marks, after its first character, text that spells a media token; the text is split there. A Unicode
#: noncharacter, which texts do not contain and chat templates pass through.
MARK = "\ufdd0"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
#: Alphabet of byte-level BPE: printable Latin-1 bytes are themselves, the others start at U+0100.
_BYTE_OF = {chr(byte): bytes([byte]) for byte in _PRINTABLE} | {
    chr(0x100 + place): bytes([byte]) for place, byte in enumerate(_OTHERS)
}


class Tokenizer:
    """Converts between text, tokens and bytes for one model. Thread-safe.

    Byte-level BPE (Qwen) spells tokens in an alphabet of 256 characters, one per byte; SentencePiece (Llama)
    spells single bytes as ``<0xNN>`` and a space as ``▁``.

    Attributes:
        inner: the transformers tokenizer.
        longest: maximum characters of a token.
        special_ids: ids of tokens that ``skip_special_tokens`` omits.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer
        self.longest = _MAX_COMPOSED * max(map(len, tokenizer.get_vocab()))
        self.encode("", add_special_tokens=False)  # initializes its option state before threads use it
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = {token_id: str(token.content).encode() for token_id, token in added.items()}
        self._texts: dict[int, str | None] = dict.fromkeys(added)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._decoders = {one["type"] for one in decoder.get("decoders", [decoder]) if one}
        # whether a text's bytes are the concatenated bytes of its tokens
        self._is_additive = getattr(tokenizer, "is_additive", False) or (
            self._decoders == {"ByteLevel"} and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        )

    def check_length(self, num_characters: int, max_tokens: int, param: str) -> None:
        """Raise InvalidRequest for a text that must exceed ``max_tokens`` or would take too much memory."""
        most = min(max_tokens * self.longest, max(MAX_CHARACTERS, max_tokens * _CHARACTERS_PER_TOKEN))
        if num_characters > most:
            raise InvalidRequest(
                f"the prompt has {num_characters} characters; at most {most} are accepted for a context of "
                f"{max_tokens} tokens; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; b"" for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            piece: str | None = self.inner.convert_ids_to_tokens(token_id)
            if piece is None:
                found = b""
            elif "ByteLevel" in self._decoders:
                found = b"".join(_BYTE_OF.get(one) or one.encode() for one in piece)
            elif "ByteFallback" in self._decoders:
                byte = _BYTE.fullmatch(piece)
                found = bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
            else:
                found = self.decode([token_id], skip_special_tokens=False).encode()
            self._bytes[token_id] = found
        return found

    def text_of(self, token_id: int) -> str | None:
        """Return the text that a token adds after any complete characters.

        Return None if the text depends on neighbouring tokens or is unknown, and for added tokens and parts of
        characters.
        """
        if token_id not in self._texts:
            text = self.bytes_of(token_id).decode(errors="replace") if self._is_additive else ""
            self._texts[token_id] = text if text and _INCOMPLETE not in text else None
        return self._texts[token_id]


_CONTEXT_TOKENS = 6
#: Maximum tokens to hold back for an incomplete character, which has at most three bytes.
_MAX_HELD_TOKENS = 16
#: Number of last held tokens to decode again together with the next ones.
_REREAD_TOKENS = 12
#: Maximum trailing replacement characters that may still become a character.
_MAX_OPEN = 3
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental text of one sequence.

    It holds back incomplete characters and possible beginnings of stop strings until later tokens decide. The
    state depends only on the tokens, so another instance restores it by pushing the same tokens.

    Args:
        stop: stop strings.
        min_tokens: ignore stop strings completed within this many tokens, as in vLLM.
        include_stop: whether to keep the stop string in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = [_StopString(one) for one in stop]
        self._firsts = frozenset(one[0] for one in stop)
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._context = 0  # first token to decode again, since merging across tokens can change spaces
        self._next_context = len(self._ids)
        self._before = self._decode(0)  # released text from there on
        self._num_waiting = 0  # tokens pushed since
        self._is_whole = not self._before.endswith(_INCOMPLETE)  # all is released, in whole characters
        self._held = ""
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.text = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete."""
        return self.stop_string is not None

    @property
    def num_read(self) -> int:
        """Number of characters so far, including a possible beginning of a stop string."""
        return len(self.text) + len(self._held)

    def push(self, token_id: int) -> str:
        """Add a token and return newly certain text. Sets ``stop_string`` when one is complete."""
        self._num_tokens += 1
        if self._is_whole and (text := self._tokenizer.text_of(token_id)) is not None:
            self._ids, self._context, self._next_context, self._before = [token_id], 0, 1, text
            return self._emit(text)
        self._ids.append(token_id)
        before, after = self._before, self._decode(self._context)
        if self._skip and after == before and not self._decode(len(self._ids) - 1):
            self._ids.pop()  # a hidden token: do not decode a run of them repeatedly
            return ""
        self._num_waiting += 1
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            self._is_whole = False
            return self._emit(self._give_up(after)) if self._num_waiting > _MAX_HELD_TOKENS else ""
        self._go_on(self._next_context, 0)
        self._is_whole = True
        return self._emit(after[len(before) :])

    def flush(self) -> str:
        """Return all held-back text, at the end of generation."""
        rest = "" if self._is_whole else self._decode(self._context)[len(self._before) :]
        text = self._emit(rest) + ("" if self.stopped else self._held)
        if not self.stopped:
            self.text += self._held
        self._held = ""
        return text

    def _give_up(self, after: str) -> str:
        """Return the text of bytes that form no character, except the last ones, which still may."""
        num_open = min(_MAX_OPEN, len(after) - len(after.rstrip(_INCOMPLETE)))
        certain = after[len(self._before) : len(after) - num_open]
        self._go_on(len(self._ids) - _REREAD_TOKENS, num_open)
        return certain

    def _go_on(self, context: int, num_open: int) -> None:
        """Decode from ``context`` on; its current text is released except for the last ``num_open`` characters."""
        self._context, self._next_context, self._num_waiting = context, len(self._ids), 0
        text = self._decode(context)
        self._before = text[: len(text) - num_open]

    def _decode(self, start: int) -> str:
        ids = self._ids[start:]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def _emit(self, new: str) -> str:
        """Return the certain part of the held text and ``new``; hold back the beginning of a stop string."""
        if not self._held and self._firsts.isdisjoint(new):
            self.text += new
            return new
        pending, found = self._held + new, list[tuple[int, int]]()
        for stop in self._stops:
            for at, character in enumerate(new, start=len(self._held) + 1):
                if stop.step(character) and self._num_tokens > self._min_tokens:
                    found.append((at - len(stop.text), -len(stop.text)))
                    break
        if found:
            start, length = min(found)  # the first, and the longest of several
            self.stop_string = pending[start : start - length]
            end = start - length if self._include_stop else start
            self._held = ""
        else:
            end = len(pending) - max(stop.num_matched for stop in self._stops)
            self._held = pending[end:]
        self.text += pending[:end]
        return pending[:end]


class _StopString:
    """One stop string, searched in a growing text (Knuth, Morris and Pratt 1977).

    The cost of a character depends neither on the string's length nor on the text: a client chooses both.

    Attributes:
        num_matched: length of the longest beginning of the string with which the text ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallbacks = [
            0,
            0,
        ]  # by matched length: the longest shorter match; grows with the longest match so far

    def step(self, character: str) -> bool:
        """Add a character of the text; return whether the text now ends with the string."""
        text, fallbacks, matched = self.text, self._fallbacks, self.num_matched
        while matched and text[matched] != character:
            matched = fallbacks[matched]
        matched += text[matched] == character
        if matched == len(fallbacks):
            shorter = fallbacks[-1]
            while shorter and text[shorter] != character:
                shorter = fallbacks[shorter]
            fallbacks.append(shorter + (text[shorter] == character))
        is_whole = matched == len(text)
        self.num_matched = fallbacks[matched] if is_whole else matched
        return is_whole
