"""Reading a workload's file line by line; every error names the file, the line and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec


class LineError(ValueError):
    """A fault in one line of a workload's file; the message says what would be right."""


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, its object); empty lines are passed over.

    Raises ValueError where the file cannot be read, or a line is no JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    found = False
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: expected an object such as {{...}}, one a line")
        found = True
        yield number, value
    if not found:
        raise ValueError(f"{path}: holds no requests; write one JSON object a line")


def check_keys(line: Mapping[str, Any], known: Collection[str]) -> None:
    """Keys that nobody reads are let be, as datasets have many; but not one that looks like a misspelling."""
    for key in line:
        if key not in known and (alike := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
            raise LineError(f"unknown key {key!r}; did you mean {alike[0]!r}?")


def whole_number(line: Mapping[str, Any], key: str, default: int | None = None, *, at_least: int = 1) -> int:
    value = line.get(key, default)
    if value is None:
        raise LineError(f"{key} is missing; write a whole number")
    if type(value) is not int or value < at_least:
        raise LineError(f"{key}: {value!r} is no whole number from {at_least} on")
    return value


def number(line: Mapping[str, Any], key: str) -> float | None:
    value = line.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise LineError(f"{key}: {value!r} is no number from 0 on")
    return float(value)
