"""Faults of a deployment file as sentences: the key, and what to write. The value may be a secret."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from epd_serve.config.sections import VLLM_FLAGS, Section

Location = tuple[int | str, ...]

#: Expected values by pydantic's type of error.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("byte_size", "byte_size_unit"), "a number of bytes or text such as 8GiB"),
    **dict.fromkeys(("dict_type", "model_type"), "keys and values"),
    "finite_number": "a finite number",
    "invalid_key": "keys that are text",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "list_type": "a list such as [a, b]",
    "literal_error": "{expected}",
    "path_type": "a path",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text",
    "string_type": "text",
    "tuple_type": "a list such as [a, b]",
}


def faults_of(error: ValidationError, values: Any, section: type[BaseModel]) -> dict[Location, str]:
    """Return a sentence per wrong key of ``values``, which should be a ``section``, by the key's location."""
    by_key: dict[Location, list[ErrorDetails]] = {}
    for fault in error.errors():
        by_key.setdefault(_key(fault, values), []).append(fault)
    # A nested key explains more than the other members of its union.
    outer = {key[:length] for key in by_key for length in range(len(key))}
    return {key: _sentence(faults, section) for key, faults in by_key.items() if key not in outer}


def _key(fault: ErrorDetails, values: Any) -> Location:
    """Return the location as in the file, without pydantic's names of union members."""
    key: list[int | str] = []
    for place, part in enumerate(fault["loc"], start=1):
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        elif place > 1 and not (fault["type"] == "missing" and place == len(fault["loc"])):
            continue
        key.append(part)
    return tuple(key)


def _sentence(faults: list[ErrorDetails], section: type[BaseModel]) -> str:
    """Describe the faults of one key, which are several if it allows values of several kinds."""
    first = next((fault for fault in faults if fault["type"] not in _EXPECTED), faults[0])
    kind = first["type"]
    if kind == "extra_forbidden":
        name = str(first["loc"][-1])
        paths = _paths(section)
        known = {**VLLM_FLAGS, **paths}.get(name)
        near = get_close_matches(name, paths, n=1)
        return "unknown key" + (f"; use {known}" if known else f"; did you mean {paths[near[0]]}?" if near else "")
    if kind == "missing":
        return "required"
    if kind not in _EXPECTED:
        return first["msg"].removeprefix("Value error, ")
    expected = dict.fromkeys(_EXPECTED[one["type"]].format(**one.get("ctx", {})) for one in faults)
    return f"write {' or '.join(expected)}"


def _paths(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Return the full name of every key, by its last part; of several the first, outer ones before inner ones."""
    fields = section.model_fields.items()
    found = {name: prefix + name for name, _ in fields}
    for name, field in fields:
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                found = _paths(kind, f"{prefix}{name}.") | found
    return found
