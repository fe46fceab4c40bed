"""``trace:FILE.jsonl``: requests of a Mooncake trace, at its times.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``: each id names
the content of a block of 512 tokens (the last may be shorter), so that requests with equal ids at the front share
a prefix. The text is made up: equal ids give equal text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from epd_serve.bench.types import Item, Message
from epd_serve.bench.workloads.options import (
    LineError,
    Options,
    check_keys,
    json_lines,
    optional,
    parse_count,
    parse_factor,
    parse_switch,
    whole_number,
)
from epd_serve.bench.workloads.synthetic import text_of

#: Tokens of a block, as in the traces of the Mooncake paper.
BLOCK_TOKENS = 512
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One request of a trace: ``hash_ids`` name its blocks of :data:`BLOCK_TOKENS` tokens."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Trace:
    """Settings: length_scale (of inputs and outputs, for models with a short context), requests (the first so
    many), ignore_eos (default true: answers are as long as the trace's).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError for a file that is not what it should be."""
        self.name = file.stem
        self._length_scale = options.take("length_scale", parse_factor, "1")
        num_requests = options.take("requests", optional(parse_count), "")
        ignore_eos = options.take("ignore_eos", parse_switch, "true")
        self._fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        options.check(f"trace:{file}")
        lines = []
        for line_number, line in json_lines(file):
            try:
                lines.append(parse_line(line))
            except LineError as error:
                raise ValueError(f"{file}:{line_number}: {error}") from None
        self._lines = sorted(lines, key=lambda line: line.timestamp_ms)[:num_requests]
        self.num_items: int | None = len(self._lines)

    def items(self, seed: int) -> Iterator[Item]:
        begin_ms = self._lines[0].timestamp_ms
        for index, line in enumerate(self._lines):
            yield Item(
                index=index,
                messages=(Message(role="user", parts=(self._text(line, seed),)),),
                max_tokens=self._scaled(line.output_length),
                workload=self.name,
                arrival_s=(line.timestamp_ms - begin_ms) / 1e3,
                fields=self._fields,
            )

    def _text(self, line: TraceLine, seed: int) -> str:
        """The prompt of a line. Blocks scale as the whole does, so a prefix that is shared stays shared."""
        words: list[str] = []
        left = self._scaled(line.input_length)
        for hash_id in line.hash_ids:
            block = text_of(self._scaled(BLOCK_TOKENS), Random(f"{seed}/block/{hash_id}")).split()
            words += block[:left]
            left -= min(left, len(block))
        if left:  # a trace without ids, or one whose blocks do not cover the input
            words += text_of(left, Random(f"{seed}/rest/{line.timestamp_ms}/{line.hash_ids}")).split()
        return " ".join(words)

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._length_scale))


def parse_line(line: Mapping[str, Any]) -> TraceLine:
    """Raises LineError for a line that is none of a Mooncake trace."""
    check_keys(line, _KEYS)
    timestamp = line.get("timestamp")
    if not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise LineError(f"timestamp: {timestamp!r} is no time in milliseconds")
    hash_ids = line.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(one) is int for one in hash_ids):
        raise LineError("hash_ids: expected a list of whole numbers, one for each block of 512 tokens")
    if len(hash_ids) > -(-whole_number(line, "input_length") // BLOCK_TOKENS):
        raise LineError(
            f"hash_ids: {len(hash_ids)} blocks of {BLOCK_TOKENS} tokens are more than input_length "
            f"{line['input_length']}"
        )
    return TraceLine(
        timestamp_ms=float(timestamp),
        input_length=line["input_length"],
        output_length=whole_number(line, "output_length"),
        hash_ids=tuple(hash_ids),
    )
