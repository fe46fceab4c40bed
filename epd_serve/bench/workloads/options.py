"""Parse a workload's notation, ``NAME[:FILE][,KEY=VALUE...]``, and read its file line by line."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")
_KEY = re.compile(r",([a-z_]+)=")


@dataclass(slots=True)
class Options:
    """The settings of one workload: take each, then check that none is left."""

    values: Mapping[str, str]
    _known: list[str] = field(default_factory=list)

    def take(self, key: str, parse: Callable[[str], Value], default: str) -> Value:
        """Return a parsed setting. Raises ValueError that names the key of an invalid value."""
        self._known.append(key)
        try:
            return parse(self.values.get(key, default))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def check(self, workload: str) -> None:
        """Raise ValueError for keys that were not taken."""
        if unknown := [key for key in self.values if key not in self._known]:
            raise ValueError(f"workload {workload} has no setting {unknown[0]!r}; known: {', '.join(self._known)}")


def split_spec(spec: str) -> tuple[str, Path | None, Options]:
    """Return (name, file, settings). A comma is part of the file name unless KEY= follows."""
    start, *rest = _KEY.split(spec)
    name, colon, file = start.partition(":")
    if colon and not file:
        raise ValueError(f"workload {spec!r} names no file; write {name}:FILE.jsonl")
    if twice := sorted({key for key in rest[::2] if rest[::2].count(key) > 1}):
        raise ValueError(f"workload setting {', '.join(twice)} is given twice")
    values = dict(zip(rest[::2], rest[1::2], strict=True))
    return name.strip(), Path(file).expanduser() if file else None, Options(values)


def parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def parse_share(text: str) -> float:
    if not 0 <= (value := parse_number(text)) <= 1:
        raise ValueError(f"{text!r} is not a share; write a number from 0 to 1")
    return value


def parse_factor(text: str) -> float:
    if (value := parse_number(text)) <= 0:
        raise ValueError(f"{text!r} is not a factor; write a number above 0")
    return value


def parse_switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r}; write true or false")
    return text.lower() == "true"


def parse_count(text: str) -> int | None:
    """Read a number of requests; "" stands for all and returns None."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise ValueError(f"{text!r} is not a count; write a whole number above 0")
    return int(text)


def read_lines(path: Path, parse: Callable[[int, dict[str, Any]], Value]) -> list[Value]:
    """Call ``parse`` with the number and the object of each non-empty line; return the results.

    Raises ValueError with the file and the line of a fault.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(parse(number, msgspec.json.decode(line, type=dict[str, Any])))
            except (ValueError, msgspec.MsgspecError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path} contains no requests; write one JSON object per line")
    return found


def check_keys(line: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError for a key that looks misspelt; further keys of datasets are ignored."""
    for key in line:
        if key not in known and (alike := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
            raise ValueError(f"unknown key {key!r}; did you mean {alike[0]!r}?")
