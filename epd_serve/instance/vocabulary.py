"""A tokenizer's tokens as text and as the bytes that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Vocabulary:
    """The tokens of one tokenizer. Safe for use from several threads.

    A token of a byte-level BPE (Qwen) is written in an alphabet of 256 characters, one for each byte;
    SentencePiece (Llama) writes single bytes as ``<0xNN>`` and a space as ``▁``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._known = {
            token_id: str(token.content).encode() for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._read = _reader(tokenizer)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for an id that no token has."""
        found = self._known.get(token_id)
        if found is None:
            piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
            found = self._known[token_id] = b"" if piece is None else self._read(piece, token_id)
        return found


def _reader(tokenizer: Any) -> Callable[[str, int], bytes]:
    """Piece and id of a token → its bytes, by the tokenizer's own decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
    kinds = {one["type"] for one in decoder.get("decoders", [decoder]) if one}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()
        return lambda piece, _: b"".join(alphabet.get(one) or one.encode() for one in piece)
    if "ByteFallback" in kinds:
        return _read_sentencepiece
    return lambda _, token_id: str(tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _read_sentencepiece(piece: str, token_id: int) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Character → byte: printable bytes of Latin-1 are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}
