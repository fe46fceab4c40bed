"""A sequence of tokens on its way through an engine, and the states it may pass through."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

from epd_serve.types import MediaSpan, SamplingParams

FinishReason = Literal["stop", "length"]
#: In an output: a token that the device has chosen, or will, and the host does not know yet. Only ever the last.
PLACEHOLDER = -1


class SequenceState(Enum):
    WAITING = auto()  # no blocks: it is new, or was preempted
    RUNNING = auto()  # holds blocks, takes part in steps
    TRANSFERRING = auto()  # prefill is done; the blocks are being copied to the decode instance
    FINISHED = auto()  # blocks given back
    ABORTED = auto()  # to be removed as soon as no step or copy uses its blocks


_WAITING, _RUNNING, _TRANSFERRING, _FINISHED, _ABORTED = SequenceState
_NEXT = {
    _WAITING: {_RUNNING, _ABORTED},
    _RUNNING: {_WAITING, _TRANSFERRING, _FINISHED, _ABORTED},
    _TRANSFERRING: {_FINISHED, _ABORTED},
    _ABORTED: {_FINISHED},
    _FINISHED: set[SequenceState](),
}


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sequence:
    """One prompt and what was generated after it.

    "Prefill" and "decode" are no phases: a step computes some of the tokens that lie between ``num_computed`` and
    ``num_tokens``; when the two meet, the next token is sampled.

    Attributes:
        both_ways: runs of tokens, (first, end), that see all of themselves; a chunk ends within none of them.
        index: number of this one of the request's ``n`` choices.
        max_tokens: output tokens allowed, filled from the context length where the client named none.
        positions: rotary positions of the prompt, opaque here ([axes, prompt tokens] tensor); None where another
            instance computed it.
        position_delta: number that M-RoPE adds to the index of a token after the prompt.
        num_sequences: choices that will be forked from this sequence after its prompt (``n``), and sampled there.
        arrival_s: time at which this engine got the request, monotonic seconds; 0 before.
        hand_off: whether another instance decodes; then the sequence needs blocks for its prompt alone.
        blocks: block table. forks: the first own block of each choice to be forked.
        states: blocks of its recurrent state, then of that of each choice to be forked; empty: the model has none.
        constraint: the grammar of its answer and its position there, opaque here; None where there is none.
        rules: the meaning of its lists of tokens, by place, opaque here; all choices share it.
        num_cached: known tokens that were found in the prefix cache when it first got its blocks.
        output_ids: generated tokens; a sequence that goes on from elsewhere begins with some.
        wanted_logprobs: known tokens, by index, whose log-probabilities are wanted; never the first.
        logprobs: those that were computed, opaque here.
        saved: the KV of the computed tokens while they have no blocks, opaque here; None where there is none.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    positions: Any
    position_delta: int = 0
    spans: AbstractSequence[MediaSpan] = ()
    both_ways: AbstractSequence[tuple[int, int]] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    index: int = 0
    num_sequences: int = 1
    arrival_s: float = 0.0
    hand_off: bool = False
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0
    num_cached: int | None = None
    blocks: list[int] = field(default_factory=list)
    forks: list[list[int]] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)
    constraint: Any = None
    rules: dict[Any, Any] = field(default_factory=dict)
    saved: Any = None
    wanted_logprobs: range = range(0)
    logprobs: dict[int, Any] = field(default_factory=dict)
    state: SequenceState = SequenceState.WAITING
    stop_token_ids: frozenset[int] | None = None  # as a set; made when it is needed

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def state_blocks(self) -> list[int]:
        """The blocks of its own recurrent state; none where the model has none."""
        return self.states[0] if self.states else []

    @property
    def num_sampled(self) -> int:
        """Tokens sampled once all known ones are computed: the first one of each choice, later one by one."""
        return 1 if self.output_ids else self.num_sequences

    @property
    def num_forked(self) -> int:
        """Sequences that need blocks of their own when this one gets its blocks."""
        return 1 if self.hand_off else self.num_sampled

    @property
    def is_decoding(self) -> bool:
        """Whether its newest token is all that is to be computed here; what is handed off is prefilled."""
        num_output = len(self.output_ids)  # asked of each sequence in each step
        return num_output > 0 and not self.hand_off and len(self.prompt_ids) + num_output - self.num_computed == 1

    @property
    def is_complete(self) -> bool:
        """Whether its last token is on its way."""
        ids = self.output_ids
        return len(ids) >= self.max_tokens and ids[-1:] == [PLACEHOLDER]

    def reusable_hashes(self, block_size: int) -> list[bytes]:
        """The hashes of blocks whose KV may be found in a cache: behind their tokens logits are needed."""
        lacks_logprobs = len(self.logprobs) < len(self.wanted_logprobs)
        end = self.wanted_logprobs.start if lacks_logprobs else self.num_tokens
        return self.block_hashes[: (end - 1) // block_size]

    @property
    def goes_on(self) -> bool:
        """Whether its tokens are still wanted here."""
        return self.state is _RUNNING or self.state is _WAITING

    def fork(self, index: int, blocks: list[int]) -> Sequence:
        """Another choice of this computed prompt, with a block table of its own."""
        return replace(
            self,
            index=index,
            num_sequences=1,
            output_ids=[],
            blocks=blocks,
            forks=[],
            states=self.states[index : index + 1],
            constraint=None if self.constraint is None else self.constraint.fork(),
            wanted_logprobs=range(0),
            logprobs={},
        )

    def move_to(self, state: SequenceState) -> None:
        """The one place where a state changes. Raises AssertionError for a transition the table lacks."""
        assert state in _NEXT[self.state], f"{self.request_id}: {self.state.name} -> {state.name}"
        self.state = state

    def finish_reason(self, token_id: int, count: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Say why generation ends with ``token_id`` as the ``count``-th output token; None where it goes on."""
        if count >= self.sampling.min_tokens:
            if token_id in eos_token_ids and not self.sampling.ignore_eos:
                return "stop"
            if self.stop_token_ids is None:
                self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
            if token_id in self.stop_token_ids:
                return "stop"
        return "length" if count >= self.max_tokens else None
