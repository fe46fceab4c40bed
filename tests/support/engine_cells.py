"""A model and a cache of bookkeeping: what an engine does with blocks and tokens shows, and takes no time.

A block remembers which token was computed into each of its places, a step finds all tokens before its own there or
fails, and the next token is a function of all tokens before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Any

from device.registry import get_device
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import LanguageStream
from epd_serve.engine.engine import SampledToken, SampledTokens
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import PLACEHOLDER, Sequence
from epd_serve.types import MediaSpan

BLOCK_SIZE = 2


def next_token(tokens: AbstractSequence[int], index: int) -> int:
    return (sum((i + 1) * token for i, token in enumerate(tokens)) * 7 + index * 3 + len(tokens)) % 40


def stream_of_a_cpu() -> LanguageStream:
    return LanguageStream(get_device("cpu"), DeviceBoard(None, 0, time.monotonic), limit_s=None)


class Cells:
    """The tokens computed into each place of each block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[list[Any]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.broken = False

    def copy_block(self, source: int, target: int) -> None:
        self.blocks[target] = list(self.blocks[source])

    def save(self, blocks: AbstractSequence[int]) -> list[list[Any]]:
        if self.broken:
            self.broken = False
            raise MemoryError("no room for it")
        return [list(self.blocks[block]) for block in blocks]

    def restore(self, saved: list[list[Any]], first: int, blocks: AbstractSequence[int]) -> None:
        for block, content in zip(blocks, saved[first : first + len(blocks)], strict=True):
            self.blocks[block] = list(content)

    def write(self, blocks: AbstractSequence[int], position: int, content: Any) -> None:
        self.blocks[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = (position, content)

    def advance(
        self, blocks: AbstractSequence[int], contents: AbstractSequence[Any], start: int, end: int
    ) -> None:
        """Let a state, which must be that of the tokens before ``start``, be that of those before ``end``."""
        for part, block in enumerate(blocks):
            assert not start or self.blocks[block] == [part, contents[:start]], "a state of other tokens"
            self.blocks[block] = [part, contents[:end]]

    def check(self, blocks: AbstractSequence[int], contents: AbstractSequence[Any]) -> None:
        for position, content in enumerate(contents):
            found = self.blocks[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert found == (position, content), f"position {position}: {found} instead of {content}"


def contents(tokens: AbstractSequence[int], spans: AbstractSequence[MediaSpan]) -> list[Any]:
    """The tokens, an image's with their image and its row."""
    found: list[Any] = list(tokens)
    for span in spans:
        found[span.start : span.end] = [(span.mm_hash, span.offset + row) for row in range(span.length)]
    return found


class Runner:
    """Computes into cells."""

    def __init__(self, cells: Cells, spans: Mapping[str, AbstractSequence[MediaSpan]]) -> None:
        self.cells = cells
        self.spans = spans

    def launch(
        self,
        output: ScheduleOutput,
        features: Mapping[str, Any],
        on_layer: Callable[[int], None] | None = None,
        before: Step | None = None,
    ) -> Step:
        return Step(self, output, features, {} if before is None else before.tokens)


class Step:
    """Writes at its launch, and finds what it wrote when its tokens are read."""

    def __init__(
        self,
        runner: Runner,
        output: ScheduleOutput,
        features: Mapping[str, Any],
        fed: Mapping[Sequence, list[int]],
    ) -> None:
        self.runner = runner
        self.tokens: dict[Sequence, list[int]] = {}
        self.known: dict[Sequence, list[int]] = {}
        self.used: dict[Sequence, list[int]] = {}
        self.sampled: list[tuple[Sequence, bool]] = []
        chunks = [(s, s.num_tokens - 1, s.num_tokens) for s in output.decodes]
        chunks += [(s, s.num_computed, s.num_computed + count) for s, count in output.prefills]
        for sequence, start, end in chunks:
            assert len(sequence.output_ids) < sequence.max_tokens, "computed beyond its last token"
            tokens = sequence.prompt_ids + sequence.output_ids
            if tokens[-1] == PLACEHOLDER:
                tokens[-1:] = fed[sequence]
            assert PLACEHOLDER not in tokens
            for span in sequence.spans:
                assert span.end <= start or span.start >= end or span.mm_hash in features
            self.known[sequence], self.used[sequence] = tokens, list(sequence.blocks)
            content = self.content(sequence)
            runner.cells.advance(sequence.state_blocks, content, start, end)
            for position in range(start, end):
                runner.cells.write(sequence.blocks, position, content[position])
            runner.cells.check(sequence.blocks, content[:end])
            if end == len(tokens):
                self.sampled.append((sequence, bool(sequence.output_ids)))

    def content(self, sequence: Sequence) -> list[Any]:
        return contents(self.known[sequence], self.runner.spans[sequence.request_id])

    def sample(self) -> None:
        for sequence, is_decoding in self.sampled:
            tokens = self.known[sequence]
            assert not sequence.is_active or tokens == sequence.prompt_ids + sequence.output_ids
            indices = [sequence.index] if is_decoding else range(sequence.num_sequences)
            self.tokens[sequence] = [next_token(tokens, index) for index in indices]

    def read(self) -> SampledTokens:
        for sequence, blocks in self.used.items():
            if blocks and sequence.blocks[: len(blocks)] == blocks:  # else others may have them by now
                computed = min(len(self.known[sequence]), sequence.num_computed)
                self.runner.cells.check(blocks, self.content(sequence)[:computed])
        return [
            (sequence, [SampledToken(token) for token in self.tokens[sequence]]) for sequence, _ in self.sampled
        ]
