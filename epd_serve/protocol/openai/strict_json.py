"""JSON as the gateway takes it: msgspec's, with bounds on depth and on the number of values."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from epd_serve.errors import InvalidRequest, TooLarge

#: Deepest nesting of lists and objects.
MAX_DEPTH = 64
#: Lists and objects together, as each costs a microsecond or more to check.
MAX_CONTAINERS = 16_384
#: Values of any kind: prompts may be lists of token ids.
MAX_VALUES = 262_144

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_decoder = msgspec.json.Decoder()
_NESTED = frozenset({dict, list})


class JSONTooLarge(ValueError):
    """The text has more values than are read here."""


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidRequest, with the place where the text stops being one."""
    try:
        check_size(body)
        fields = _decoder.decode(body.removeprefix(b"\xef\xbb\xbf"))  # a byte order mark (RFC 8259, section 8.1)
        if _is_too_deep(fields):
            raise RecursionError
    except JSONTooLarge as error:
        raise TooLarge(f"the body is too much JSON: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        problem = f"the body is not valid JSON: lists and objects are nested more than {MAX_DEPTH} deep"
        raise InvalidRequest(problem, code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest('the body must be a JSON object, such as {"messages": [...]}', code="invalid_json")
    return fields


def check_size(text: bytes | bytearray) -> None:
    """Raise JSONTooLarge for a text of too many values, before anything is made of them.

    Each value but the first begins a list or an object, or follows a comma. The strings are left out if they
    could matter.
    """
    if _has_too_many(text) and (problem := _has_too_many(_STRING.sub(b'""', text))):
        raise JSONTooLarge(problem)


def _has_too_many(text: bytes | bytearray) -> str:
    num_containers = _count(text, b"[", MAX_CONTAINERS) + _count(text, b"{", MAX_CONTAINERS)
    if num_containers > MAX_CONTAINERS:
        return f"it has more than {MAX_CONTAINERS} lists and objects; send fewer"
    if num_containers + _count(text, b",", MAX_VALUES) >= MAX_VALUES:
        return f"it has more than {MAX_VALUES} values; send fewer"
    return ""


def _count(text: bytes | bytearray, character: bytes, most: int) -> int:
    """Count up to ``most`` + 1; ``bytes.find`` passes megabytes of base64 20 times as fast as ``bytes.count``."""
    number, at = 0, text.find(character)
    while at >= 0 and number <= most:
        number += 1
        at = text.find(character, at + 1)
    return number


def _is_too_deep(value: Any) -> bool:
    level = [value] if type(value) in _NESTED else []
    for _ in range(MAX_DEPTH):
        members = [one.values() if type(one) is dict else one for one in level]
        level = [member for some in members for member in some if type(member) in _NESTED]
    return bool(level)
