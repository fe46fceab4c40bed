"""JSON as the gateway takes it: not too large, not too deep, and no key twice in an object.

Parsers differ in what they make of a repeated key (RFC 8259, section 4); a request that two readers may see in two
ways is refused. All costs are linear in the text, and for usual bodies a few microseconds: the exact scan runs
only where cheap counts leave a doubt.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from epd_serve.errors import InvalidRequest, TooLarge

#: Deepest nesting of lists and objects.
MAX_DEPTH = 64
#: Longer texts are refused unread: parsing holds the interpreter. Pictures in base64 are no part of a text
#: (proxy/api/payloads.py).
MAX_TEXT_BYTES = 8 << 20
#: Backslashes; each takes several times as long as another character.
MAX_ESCAPES = 2 << 20
#: Lists and objects together, as each costs a microsecond or more to check.
MAX_CONTAINERS = 16_384
#: Values of any kind: prompts may be lists of token ids.
MAX_VALUES = 262_144
#: Keys of one object.
MAX_KEYS = 4096
#: Shorter texts are scanned whole; from longer ones data URLs, which hold neither brackets nor keys, are cut out.
_LONG = 4096
_DATA_URL = b'"data:'
#: So many data URLs are cut out at most: each costs more than it saves if it is short.
_MAX_CUT = 4096
#: What ends a key, and now and then begins a string.
_KEY_END = re.compile(rb'"[ \t\r\n]*:')
#: Bytes that are worked on at once, so that other threads get their turn.
_PIECE = 128 << 10
#: More brackets than this are looked at one by one before anything is decoded: no recursion gets near any limit.
_SAFE_BRACKETS = 500
#: A string (with a closing quote or the end of the text: no start is tried twice) or a bracket.
_TOKEN = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))([ \t\r\n]*:)?|[\[{]|([\]}])', re.DOTALL)

#: Windows' programs write it before UTF-8.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()
_NESTED = frozenset({dict, list})


class JSONRefused(ValueError):
    """The text is no JSON, or none that is taken here."""


class JSONTooLarge(JSONRefused):
    """The text is more than is read here, valid or not."""


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidRequest, with the place where the text stops being one."""
    try:
        fields = decode(body)
    except JSONTooLarge as error:
        raise TooLarge(f"the body is too much JSON: {error}") from error
    except JSONRefused as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest('the body must be a JSON object, such as {"messages": [...]}', code="invalid_json")
    return fields


def decode(text: bytes | bytearray) -> Any:
    """JSON → Python objects. Raises JSONRefused that says what is wrong."""
    if len(text) > MAX_TEXT_BYTES:
        raise JSONTooLarge(
            f"it has {len(text)} bytes, without pictures in base64; at most {MAX_TEXT_BYTES} are read"
        )
    if text.startswith(_BYTE_ORDER_MARK):  # RFC 8259, section 8.1: a reader may ignore it
        text = text[len(_BYTE_ORDER_MARK) :]
    outline = text
    if len(text) > _LONG:
        if text.count(b"\\") > MAX_ESCAPES:
            raise JSONTooLarge(f"it has more than {MAX_ESCAPES} escapes in its strings; send fewer")
        outline = _without_escapes(_without_data_urls(text))
        check_size(outline)
    num_brackets = outline.count(b"[") + outline.count(b"{")
    if num_brackets > _SAFE_BRACKETS:
        _check_depth(outline)
    try:
        value = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JSONRefused(_why(text) or str(error)) from error
    # Written again, it has as many colons as the text: then no key was repeated, which is one more colon there.
    # Strings have the same number in both where no character is written by its number.
    is_plain = num_brackets <= MAX_DEPTH and len(text) <= _LONG and text.find(b"\\u") < 0
    if is_plain and _encoder.encode(value).count(b":") == text.count(b":"):
        return value
    num_keys = _count_keys(value)
    if outline.count(b":") == num_keys:  # no string has one: there are as many keys in the text
        return value
    if _count_key_ends(outline) != num_keys and _count_key_tokens(outline) != num_keys:
        raise JSONRefused(f"the key {_repeated_key(text)!r} occurs twice in one object; send it once")
    return value


def _why(text: bytes | bytearray) -> str:
    """Say what is there in place of JSON, where that is known."""
    if not text.strip():
        return "it is empty"
    if text.startswith(b"\x1f\x8b"):
        return "it is compressed with gzip; send it as it is"
    if b"\0" in text[:4]:
        return "it is in UTF-16 or UTF-32; send UTF-8"
    return ""


def check_size(text: bytes | bytearray) -> None:
    """Raises JSONTooLarge for a text of too many values, before anything is made of them.

    Each value but the first is the first of a list or an object, or comes behind a comma. Where brackets,
    commas or quotation marks are many, those in strings are left out.
    """
    num_brackets = text.count(b"[") + text.count(b"{")
    if (
        num_brackets <= MAX_CONTAINERS
        and num_brackets + text.count(b",") < MAX_VALUES
        and text.count(b'"') <= 4 * MAX_VALUES  # a value or a key each
    ):
        return
    text = _without_escapes(text)
    num_brackets, num_values, num_quotes = 0, 1, 0
    for start in range(0, len(text), _PIECE):
        pieces = text[start : start + _PIECE].split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        num_quotes += len(pieces) - 1
        new_brackets = outside.count(b"[") + outside.count(b"{")
        num_brackets += new_brackets
        num_values += new_brackets + outside.count(b",")
        if num_brackets > MAX_CONTAINERS:
            raise JSONTooLarge(f"it has more than {MAX_CONTAINERS} lists and objects; send fewer")
        if num_values > MAX_VALUES or num_quotes > 4 * MAX_VALUES:
            raise JSONTooLarge(f"it has more than {MAX_VALUES} values; send fewer")


def _without_escapes(text: bytes | bytearray) -> bytes | bytearray:
    r"""The text without ``\\`` and ``\"``: each quotation mark left begins or ends a string."""
    if text.find(b"\\") < 0:
        return text
    pieces: list[bytes | bytearray] = []
    start = 0
    while start < len(text):
        piece = text[start : start + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape is not cut in two
            piece = text[start : start + _PIECE + 1]
        start += len(piece)
        pieces.append(piece.replace(rb"\\", b"").replace(rb"\"", b""))
    return b"".join(pieces)


def _without_data_urls(text: bytes | bytearray) -> bytes | bytearray:
    pieces: list[bytes | bytearray] = []
    position = 0
    while (start := text.find(_DATA_URL, position)) >= 0 and len(pieces) < _MAX_CUT:
        start += len(_DATA_URL)
        end = text.find(b'"', start)
        if end < 0 or text.find(b"\\", start, end) >= 0:  # unfinished, or with escapes: the exact scan's business
            end = start
        pieces.append(text[position:start])
        position = end
    if not pieces:
        return text
    return b"".join([*pieces, text[position:]])


def _check_depth(text: bytes | bytearray) -> None:
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[1] is not None:
            continue
        depth += 1 if token[3] is None else -1
        if depth > MAX_DEPTH:
            raise _too_deep()


def _too_deep() -> JSONRefused:
    return JSONRefused(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _count_keys(value: Any) -> int:
    """The number of keys of all objects in a decoded value.

    Raises JSONRefused for nesting that is too deep, JSONTooLarge for an object with too many keys.
    """
    number = depth = 0
    level = [value] if type(value) in _NESTED else []
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for one in level:
            members = one
            if type(one) is dict:
                number += len(one)
                if len(one) > MAX_KEYS:
                    raise JSONTooLarge(f"an object in it has {len(one)} keys; at most {MAX_KEYS} are read")
                members = one.values()
            below += [member for member in members if type(member) in _NESTED]
        level = below
    return number


def _count_key_ends(text: bytes | bytearray) -> int:
    """An upper bound of the number of keys; it is exact unless a string begins with a colon."""
    return len(_KEY_END.findall(_without_escapes(text)))


def _count_key_tokens(text: bytes | bytearray) -> int:
    return sum(token[2] is not None for token in _TOKEN.finditer(text))


def _repeated_key(text: bytes | bytearray) -> str:
    """The first key that occurs twice in an object of a valid text that has one."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Found(key)
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=check)
    except _Found as found:
        return str(found)[:100]
    return "?"  # pragma: no cover


class _Found(Exception):
    pass
