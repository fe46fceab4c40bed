"""A sequence of tokens in an engine, and its states."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

from epd_serve.types import MediaSpan, SamplingParams

FinishReason = Literal["stop", "length"]
#: The last output token while only the device knows it.
PLACEHOLDER = -1


class SequenceState(Enum):
    WAITING = auto()  # new or preempted, without blocks
    RUNNING = auto()  # has blocks and takes part in steps
    TRANSFERRING = auto()  # prefilled; the decode instance is reading its blocks
    FINISHED = auto()  # blocks released
    ABORTED = auto()  # removed once no step or copy uses its blocks


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
    """A prompt and its output.

    A step computes some of the tokens between ``num_computed`` and ``num_tokens``, in prefill and decode alike;
    when the two are equal, the next token is sampled.

    Attributes:
        max_tokens: limit of output tokens, by default the rest of the context.
        positions: rotary positions of the prompt ([axes, prompt tokens] tensor, opaque here); None if another
            instance computed it.
        position_delta: added by M-RoPE to the index of a token after the prompt.
        both_ways: bidirectional runs of tokens, (first, end); no chunk ends within one.
        index: number of this choice among the request's ``n``.
        num_sequences: choices to fork after the prompt (``n``).
        arrival_s: when the engine received the request, monotonic seconds; 0 before.
        hand_off: whether another instance decodes, so that only the prompt needs blocks.
        output_ids: generated tokens; a continued stream begins with some.
        num_cached: tokens found in the prefix cache when it was first admitted.
        blocks: block table.
        forks: first own block of every choice to fork.
        states: blocks of the recurrent state, its own and those of the choices to fork; empty without one.
        constraint: grammar of the answer and the position in it, opaque here.
        rules: rules of the sampler, shared by all choices, opaque here.
        saved: KV of a preempted sequence, opaque here.
        wanted_logprobs: indices of known tokens to compute log-probabilities of; never the first token.
        logprobs: computed log-probabilities, opaque here.
        is_cancelled: whether its request was given up before the sequence ended.
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
    is_cancelled: bool = False
    state: SequenceState = SequenceState.WAITING
    stop_token_ids: frozenset[int] | None = None  # a cache

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
        """Blocks of its own recurrent state."""
        return self.states[0] if self.states else []

    @property
    def num_sampled(self) -> int:
        """Tokens to sample next: one for each choice after the prompt, then one."""
        return 1 if self.output_ids else self.num_sequences

    @property
    def num_forked(self) -> int:
        """Choices that need blocks when this sequence is admitted."""
        return 1 if self.hand_off else self.num_sampled

    @property
    def is_decoding(self) -> bool:
        """True if it decodes here and only its newest token is uncomputed."""
        num_output = len(self.output_ids)  # inlined properties, as this runs for each sequence in each step
        return num_output > 0 and not self.hand_off and len(self.prompt_ids) + num_output - self.num_computed == 1

    @property
    def is_complete(self) -> bool:
        """True if its last token is being computed."""
        ids = self.output_ids
        return len(ids) >= self.max_tokens and ids[-1:] == [PLACEHOLDER]

    def reusable_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of blocks that may come from the prefix cache; tokens that need logits may not."""
        lacks_logprobs = len(self.logprobs) < len(self.wanted_logprobs)
        end = self.wanted_logprobs.start if lacks_logprobs else self.num_tokens
        return self.block_hashes[: (end - 1) // block_size]

    @property
    def is_active(self) -> bool:
        """True while it generates tokens here."""
        return self.state is _RUNNING or self.state is _WAITING

    def fork(self, index: int, blocks: list[int]) -> Sequence:
        """Return another choice of this computed prompt, with its own block table."""
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
        """Change the state. Raises AssertionError for an invalid transition."""
        assert state in _NEXT[self.state], f"{self.request_id}: {self.state.name} -> {state.name}"
        self.state = state

    def finish_reason(self, token_id: int, count: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Return why generation ends with ``token_id`` as output token number ``count``, or None."""
        if count >= self.sampling.min_tokens:
            if token_id in eos_token_ids and not self.sampling.ignore_eos:
                return "stop"
            if self.stop_token_ids is None:
                self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
            if token_id in self.stop_token_ids:
                return "stop"
        return "length" if count >= self.max_tokens else None
