"""``trace:FILE.jsonl``: requests of a Mooncake trace, at its times.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``. Each id names
the content of a block of 512 tokens (the last may be shorter): requests with equal leading ids share a prefix. The
text is generated; equal ids give equal text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from epd_serve.bench.types import Item, Message
from epd_serve.bench.workloads.notation import (
    Options,
    check_keys,
    parse_count,
    parse_factor,
    parse_switch,
    read_lines,
)
from epd_serve.bench.workloads.synthetic import text_of

#: Tokens per block in the traces of the Mooncake paper.
BLOCK_TOKENS = 512


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace; ``timestamp`` in ms."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...] = ()


class Trace:
    """The requests of a trace.

    Settings: length_scale (factor on inputs and outputs, for models with a short context), requests (how many to
    take), ignore_eos (default true: answers have the trace's lengths).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError for an invalid file."""
        self.name = file.stem
        self._length_scale = options.take("length_scale", parse_factor, "1")
        num_requests = options.take("requests", parse_count, "")
        self._fields = {"ignore_eos": True} if options.take("ignore_eos", parse_switch, "true") else {}
        options.check(f"trace:{file}")
        lines = read_lines(file, lambda _, line: parse_line(line))
        self._lines = sorted(lines, key=lambda line: line.timestamp)[:num_requests]
        self.num_items: int | None = len(self._lines)

    def items(self, seed: int) -> Iterator[Item]:
        begin_ms = self._lines[0].timestamp
        for index, line in enumerate(self._lines):
            yield Item(
                index=index,
                messages=(Message(role="user", parts=(self._make_text(line, seed),)),),
                max_tokens=self._scale(line.output_length),
                workload=self.name,
                arrival_s=(line.timestamp - begin_ms) / 1e3,
                fields=self._fields,
            )

    def _make_text(self, line: TraceLine, seed: int) -> str:
        """Return the prompt of a line. Blocks scale with the whole, so a shared prefix stays shared."""
        words: list[str] = []
        left = self._scale(line.input_length)
        for hash_id in line.hash_ids:
            block = text_of(self._scale(BLOCK_TOKENS), Random(f"{seed}/block/{hash_id}")).split()
            words += block[:left]
            left -= min(left, len(block))
        if left:  # ids are missing or do not cover the input
            words += text_of(left, Random(f"{seed}/rest/{line.timestamp}/{line.hash_ids}")).split()
        return " ".join(words)

    def _scale(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._length_scale))


def parse_line(line: Mapping[str, Any]) -> TraceLine:
    """Parse a line. Raises ValueError or msgspec's ValidationError."""
    check_keys(line, TraceLine.__struct_fields__)
    found = msgspec.convert(line, TraceLine)
    if len(found.hash_ids) > -(-found.input_length // BLOCK_TOKENS):
        raise ValueError(
            f"hash_ids: {len(found.hash_ids)} blocks of {BLOCK_TOKENS} tokens exceed input_length "
            f"{found.input_length}"
        )
    return found
