"""Stage-level batching (TriInfer, Algorithm 1): decodes, then running prefills, then new requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from epd_serve.sched.block_tables import BlockTables
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_cost import NO_LIMIT, ChunkPace, StepPace
from epd_serve.types import MediaSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of a step: tokens (decodes included), sequences, and time by the pace."""

    max_num_tokens: int
    max_num_seqs: int
    pace: StepPace | ChunkPace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOutput:
    """One step: decodes compute one token each, prefills the given number of tokens.

    Attributes:
        admitted: the step's sequences that were waiting; they get blocks.
        preempted: sequences that give up their blocks before the step.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.prefills)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *(sequence for sequence, _ in self.prefills)]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


class Features(Protocol):
    """The encoder outputs that prompts need."""

    def has(self, mm_hash: str) -> bool: ...

    def starved(self, mm_hash: str) -> None:
        """Record that only this feature keeps a sequence from being computed."""


def schedule(
    running: AbstractSequence[Sequence],
    waiting: Iterable[Sequence],
    budget: Budget,
    blocks: BlockTables,
    features: Features,
    *,
    watermark: int = 0,
) -> ScheduleOutput:
    """Choose the next step. Pure.

    A decode that lacks a block preempts the last running sequence. So the first one always advances, unless all
    other blocks belong to sequences that do not run; the last one keeps its blocks and waits.

    Args:
        running: sequences with blocks, by descending right to keep them.
        waiting: sequences without blocks, in order of admission.
        watermark: blocks that admission leaves for running sequences, if any.
    """
    tokens, seqs, free_blocks = budget.max_num_tokens, budget.max_num_seqs, blocks.num_free
    pace = budget.pace or NO_LIMIT
    meter = pace.meter()
    output = ScheduleOutput()

    # Decodes first; the youngest sequences give their blocks to the oldest.
    unfinished: list[Sequence] = []
    youngest = reversed(running)
    for sequence in running:
        if sequence.is_complete or (output.preempted and sequence in output.preempted):
            continue
        if not sequence.is_decoding:
            unfinished.append(sequence)
        elif tokens and seqs:
            needed = blocks.num_needed(sequence)
            while needed > free_blocks and (victim := next(youngest, sequence)) is not sequence:
                if not victim.hand_off:  # or its blocks are being read
                    output.preempted.append(victim)
                    free_blocks += blocks.num_freed(victim)
            if needed <= free_blocks:
                output.decodes.append(sequence)
                meter.take_decode(sequence.num_tokens)
                free_blocks, tokens, seqs = free_blocks - needed, tokens - 1, seqs - 1

    # Then chunks of the prompts that have blocks.
    for sequence in unfinished:
        if not tokens or not seqs:
            break
        if sequence in output.preempted:
            continue
        ready = ready_tokens(sequence, blocks, features) - sequence.num_computed
        count = meter.take_chunk(sequence.num_computed, min(tokens, ready))
        if count:
            output.prefills.append((sequence, count))
            tokens, seqs = tokens - count, seqs - 1

    # Then new requests, unless blocks are short.
    if output.preempted:
        return output
    num_decodes = context = -1  # sequences that decode here, now or later, and their tokens; counted when needed
    for sequence in waiting:
        if not tokens or not seqs:
            break
        ready = ready_tokens(sequence, blocks, features) - sequence.num_computed
        if not ready or sequence.is_complete:
            continue  # its first image is still being encoded; later requests need not wait
        needed = blocks.num_needed(sequence)
        if needed + (watermark if running or output.admitted else 0) > free_blocks:
            break  # first come, first served: smaller requests would starve it
        if budget.pace and not sequence.hand_off:
            if num_decodes < 0:
                here = [one.num_tokens for one in (*running, *output.admitted) if not one.hand_off]
                num_decodes, context = len(here), sum(here)
            if not pace.has_room(num_decodes, context, sequence.num_tokens):
                break
        if sequence.is_decoding:  # preempted, with saved KV
            count = 1
            meter.take_decode(sequence.num_tokens)
            output.decodes.append(sequence)
        else:
            count = meter.take_chunk(sequence.num_computed, min(tokens, ready))
            if not count:
                break
            output.prefills.append((sequence, count))
        output.admitted.append(sequence)
        if num_decodes >= 0 and not sequence.hand_off:
            num_decodes, context = num_decodes + 1, context + sequence.num_tokens
        free_blocks, tokens, seqs = free_blocks - needed, tokens - count, seqs - 1
    return output


def ready_tokens(sequence: Sequence, blocks: BlockTables, features: Features) -> int:
    """Return how many leading tokens can be computed now: those before the first missing feature."""
    if not sequence.spans or sequence.saved is not None:
        return sequence.num_tokens
    is_waiting = sequence.state is SequenceState.WAITING
    computed = blocks.num_cached(sequence) if is_waiting else sequence.num_computed
    span = _missing_span(sequence, computed, sequence.num_tokens, features.has)
    if span is None:
        return sequence.num_tokens
    if span.start <= computed:
        features.starved(span.mm_hash)
    return max(span.start, computed)


def possible_prefills(
    prefills: Iterable[tuple[Sequence, int]], has: Callable[[str], bool]
) -> list[tuple[Sequence, int]]:
    """Return the prefills up to their first missing feature, without cutting a bidirectional run of tokens.

    The first prefill takes such a run whole even beyond the budget, so it always advances. Planned prefills may
    have become impossible: an admission evicts cached prefixes, and a feature that only another request holds may
    go.
    """
    possible: list[tuple[Sequence, int]] = []
    for sequence, count in prefills:
        start, end = sequence.num_computed, min(sequence.num_computed + count, sequence.num_tokens)
        if sequence.both_ways:
            end = _uncut(sequence, start, end, grows=not possible)
        span = _missing_span(sequence, start, end, has)
        if span is not None:
            end = _uncut(sequence, start, max(span.start, start), grows=False)
        if end > start:
            possible.append((sequence, end - start))
    return possible


def _missing_span(sequence: Sequence, start: int, end: int, has: Callable[[str], bool]) -> MediaSpan | None:
    """Return the first media item within [start, end) whose feature is missing."""
    return next((s for s in sequence.spans if s.end > start and s.start < end and not has(s.mm_hash)), None)


def _uncut(sequence: Sequence, start: int, end: int, *, grows: bool) -> int:
    """Move the end of a chunk out of a bidirectional run: to its end if the chunk begins there and ``grows``,
    else to its beginning."""
    for first, behind in sequence.both_ways:
        if first < end < behind:
            return behind if grows and first <= start else max(first, start)
    return end


class Encodable(Protocol):
    @property
    def num_pixels(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Encodable)


def schedule_encodes(waiting: Iterable[ItemT], max_num_pixels: int) -> list[ItemT]:
    """Return the longest prefix of ``waiting`` within the budget in pixels, at least one item."""
    batch: list[ItemT] = []
    pixels = 0
    for item in waiting:
        pixels += item.num_pixels
        if batch and pixels > max_num_pixels:
            break
        batch.append(item)
    return batch
