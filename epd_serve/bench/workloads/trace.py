"""``trace:FILE.jsonl``: requests of a Mooncake trace, at its times.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``: each id names
the content of a block of 512 tokens (the last may be shorter), so that requests with equal ids at the front share
a prefix. The text is made up: equal ids give equal text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

from epd_serve.bench.types import Item, Message
from epd_serve.bench.workloads.options import (
    Options,
    check_keys,
    parse_count,
    parse_factor,
    parse_switch,
    read_lines,
)
from epd_serve.bench.workloads.synthetic import text_of

#: Tokens of a block, as in the traces of the Mooncake paper.
BLOCK_TOKENS = 512


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace: ``timestamp`` in ms; ``hash_ids`` name its blocks of :data:`BLOCK_TOKENS` tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...] = ()


class Trace:
    """Settings: length_scale (of inputs and outputs, for models with a short context), requests (the first so
    many), ignore_eos (default true: answers are as long as the trace's).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError for a file that is not what it should be."""
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
                messages=(Message(role="user", parts=(self._text(line, seed),)),),
                max_tokens=self._scaled(line.output_length),
                workload=self.name,
                arrival_s=(line.timestamp - begin_ms) / 1e3,
                fields=self._fields,
            )

    def _text(self, line: TraceLine, seed: int) -> str:
        """Return the prompt of a line. Blocks scale as the whole does, so a shared prefix stays shared."""
        words: list[str] = []
        left = self._scaled(line.input_length)
        for hash_id in line.hash_ids:
            block = text_of(self._scaled(BLOCK_TOKENS), Random(f"{seed}/block/{hash_id}")).split()
            words += block[:left]
            left -= min(left, len(block))
        if left:  # a trace without ids, or one whose blocks do not cover the input
            words += text_of(left, Random(f"{seed}/rest/{line.timestamp}/{line.hash_ids}")).split()
        return " ".join(words)

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self._length_scale))


def parse_line(line: Mapping[str, Any]) -> TraceLine:
    """Raises ValueError or msgspec's ValidationError for a line that is none of a Mooncake trace."""
    check_keys(line, TraceLine.__struct_fields__)
    found = msgspec.convert(line, TraceLine)
    if len(found.hash_ids) > -(-found.input_length // BLOCK_TOKENS):
        raise ValueError(
            f"hash_ids: {len(found.hash_ids)} blocks of {BLOCK_TOKENS} tokens are more than input_length "
            f"{found.input_length}"
        )
    return found
