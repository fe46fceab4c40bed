"""The notation of a workload, ``NAME[:FILE][,KEY=VALUE...]``, and reading its file line by line."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")
_KEY = re.compile(r",([a-z_]+)=")


@dataclass(slots=True)
class Options:
    """The settings of one workload; each is to be taken once, then none may be left."""

    values: Mapping[str, str]
    _known: list[str] = field(default_factory=list)

    def take(self, key: str, parse: Callable[[str], Value], default: str) -> Value:
        """Raises ValueError that names the key where its value is not understood."""
        self._known.append(key)
        try:
            return parse(self.values.get(key, default))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def check(self, workload: str) -> None:
        """Raises ValueError for keys that nobody took."""
        for key in self.values:
            if key not in self._known:
                alike = difflib.get_close_matches(key, self._known, n=1)
                hint = f"did you mean {alike[0]!r}?" if alike else f"known: {', '.join(self._known)}"
                raise ValueError(f"workload {workload} has no setting {key!r}; {hint}")


def split_spec(spec: str) -> tuple[str, Path | None, Options]:
    """(name, file, settings). A comma belongs to the file's name unless KEY= follows."""
    start, *rest = _KEY.split(spec)
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    name, colon, file = start.partition(":")
    if colon and not file:
        raise ValueError(f"workload {spec!r} names no file; write {name}:FILE.jsonl")
    if twice := {key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1}:
        raise ValueError(f"workload setting {', '.join(sorted(twice))} is given twice")
    return name.strip(), Path(file).expanduser() if file else None, Options(dict(pairs))


def parse_share(text: str) -> float:
    value = parse_number(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is no share; write a number from 0 to 1")
    return value


def parse_factor(text: str) -> float:
    value = parse_number(text)
    if value <= 0:
        raise ValueError(f"{text!r} is no factor; write a number above 0")
    return value


def parse_switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r}; write true or false")
    return text.lower() == "true"


def parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise ValueError(f"{text!r} is no count; write a whole number from 1 on")
    return int(text)


def optional(parse: Callable[[str], Value]) -> Callable[[str], Value | None]:
    """Return a parser that gives None for an empty text."""
    return lambda text: parse(text) if text else None


def parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no number")
    return value


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
