"""A model's tokenizer, and an answer's tokens to text piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from epd_serve.engine.sampling.patterns import Patterns
from epd_serve.errors import InvalidRequest

#: A longer text is refused where its context has room for fewer characters, at _CHARACTERS_PER_TOKEN: a tokenizer
#: takes about 200 bytes and a microsecond for each character, and cannot be stopped.
MAX_CHARACTERS = 1 << 20
_CHARACTERS_PER_TOKEN = 8
#: Characters that a normalizer makes one of.
_MAX_COMPOSED = 4
#: Stands in a chat's text behind the first character of what only spells a media token: the text is cut there.
#: Unicode keeps this one out of texts, and chat templates pass it on.
MARK = "\ufdd0"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
#: The bytes of a byte-level BPE: printable ones of Latin-1 are themselves, the others follow from U+0100 on.
_BYTE_OF = {chr(byte): bytes([byte]) for byte in _PRINTABLE} | {
    chr(0x100 + place): bytes([byte]) for place, byte in enumerate(_OTHERS)
}


class Tokenizer:
    """Texts to tokens, tokens to text and bytes, of one model. Safe for use from several threads.

    A token of a byte-level BPE (Qwen) is written in an alphabet of 256 characters, one for each byte;
    SentencePiece (Llama) writes single bytes as ``<0xNN>`` and a space as ``▁``.

    Attributes:
        inner: the tokenizer of transformers.
        longest: characters that a token stands for at most.
        special_ids: the tokens that ``skip_special_tokens`` leaves out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer
        self.longest = _MAX_COMPOSED * max(map(len, tokenizer.get_vocab()))
        self.encode("", add_special_tokens=False)  # sets its options, which are its state, once for all threads
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = {token_id: str(token.content).encode() for token_id, token in added.items()}
        self._texts: dict[int, str | None] = dict.fromkeys(added)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._decoders = {one["type"] for one in decoder.get("decoders", [decoder]) if one}
        # whether the bytes of a text are those of its tokens, one after another
        self._is_additive = getattr(tokenizer, "is_additive", False) or (
            self._decoders == {"ByteLevel"} and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        )

    def check_length(self, num_characters: int, max_tokens: int, param: str) -> None:
        """Raise InvalidRequest for a text that has more tokens whatever it says, or would take too much memory."""
        most = min(max_tokens * self.longest, max(MAX_CHARACTERS, max_tokens * _CHARACTERS_PER_TOKEN))
        if num_characters > most:
            raise InvalidRequest(
                f"the prompt has {num_characters} characters; at most {most} are read for a context of "
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
        """Return the bytes that a token adds to a text; none for an id that no token has."""
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
        """Return the text that a token adds wherever it stands behind whole characters.

        None where that depends on its neighbours or is not known, and for added tokens and parts of characters.
        """
        if token_id not in self._texts:
            text = self.bytes_of(token_id).decode(errors="replace") if self._is_additive else ""
            self._texts[token_id] = text if text and _INCOMPLETE not in text else None
        return self._texts[token_id]


_CONTEXT_TOKENS = 6
#: Tokens that are held back at most because they make no character yet. No more than three bytes ever do.
_MAX_HELD_TOKENS = 16
#: Of these, the last are read again with what follows ...
_REREAD_TOKENS = 12
#: ... and so many marks of incomplete characters at their end are not certain: a token of one byte makes one each.
_MAX_OPEN = 3
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_NO_STOPS = Patterns(())


class Detokenizer:
    """Text of one sequence as it grows.

    Bytes that do not yet make a character, and text that may be the beginning of a stop string, are held back
    until the next tokens decide. The state follows from the tokens alone: an instance that pushes the same tokens
    stands where the one before it stood.

    Args:
        stop: stop strings; the choices of a request share them.
        min_tokens: a stop string that is complete within so many tokens stops nothing, as in vLLM.
        include_stop: whether the stop string stays in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Patterns | None = None,
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop or _NO_STOPS
        self._node = self._stop.root
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._context = 0  # first token that is decoded again, since merging across tokens can change spaces
        self._next_context = len(self._ids)
        self._before = self._decode(0)  # text from there on that is out
        self._num_waiting = 0  # tokens since
        self._is_whole = not self._before.endswith(_INCOMPLETE)  # all that was pushed is out, in whole characters
        self._held = ""
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.text = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stop_string is not None

    @property
    def num_read(self) -> int:
        """Characters so far, those that may begin a stop string included."""
        return len(self.text) + len(self._held)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain. Sets ``stop_string`` when one is complete."""
        self._num_tokens += 1
        if self._is_whole and (text := self._tokenizer.text_of(token_id)) is not None:
            self._ids, self._context, self._next_context, self._before = [token_id], 0, 1, text
            return self._emit(text)
        self._ids.append(token_id)
        before, after = self._before, self._decode(self._context)
        if self._skip and after == before and not self._decode(len(self._ids) - 1):
            self._ids.pop()  # a token that is not shown: a run of them must not be decoded again and again
            return ""
        self._num_waiting += 1
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            self._is_whole = False
            return self._emit(self._give_up(after)) if self._num_waiting > _MAX_HELD_TOKENS else ""
        self._go_on(self._next_context, 0)
        self._is_whole = True
        return self._emit(after[len(before) :])

    def flush(self) -> str:
        """All that was held back; for the end of a generation."""
        rest = "" if self._is_whole else self._decode(self._context)[len(self._before) :]
        text = self._emit(rest) + ("" if self.stopped else self._held)
        if not self.stopped:
            self.text += self._held
        self._held = ""
        return text

    def _give_up(self, after: str) -> str:
        """The text of bytes that make no character, but for the last ones, which still may."""
        num_open = min(_MAX_OPEN, len(after) - len(after.rstrip(_INCOMPLETE)))
        certain = after[len(self._before) : len(after) - num_open]
        self._go_on(len(self._ids) - _REREAD_TOKENS, num_open)
        return certain

    def _go_on(self, context: int, num_open: int) -> None:
        """Decode from ``context`` on; its text as of now is out, but for the last ``num_open`` characters."""
        self._context, self._next_context, self._num_waiting = context, len(self._ids), 0
        text = self._decode(context)
        self._before = text[: len(text) - num_open]

    def _decode(self, start: int) -> str:
        ids = self._ids[start:]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def _emit(self, new: str) -> str:
        if self._node is self._stop.root and self._stop.first.isdisjoint(new):  # nothing is held back
            self.text += new
            return new
        pending = self._held + new
        end = self._find(new)
        if end is None:
            keep = self._node.depth
            self._held = pending[len(pending) - keep :]
            pending = pending[: len(pending) - keep]
        else:
            self._held = ""
            pending = pending[:end]
        self.text += pending
        return pending

    def _find(self, new: str) -> int | None:
        """Find the text's end by the first stop string, of several the longest; counts from what is held back."""
        node, stop = self._node, self._stop
        counts = self._num_tokens > self._min_tokens
        found: tuple[int, int] | None = None  # where it begins, and its negative length
        for at, character in enumerate(new, start=len(self._held) + 1):
            node = stop.step(node, character)
            if counts and (ends := node.ends) is not None:
                one = (at - ends.depth, -ends.depth)
                found = one if found is None else min(found, one)
            if found is not None and at - node.depth > found[0]:
                break  # what may follow begins behind it
        while not node.goes_on and node is not stop.root:
            node = node.fail
        self._node = node
        if found is None:
            return None
        start, length = found
        self.stop_string = (self._held + new)[start : start - length]
        return start - length if self._include_stop else start
