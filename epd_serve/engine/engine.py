"""The engine's books: sequences and their blocks from one step to the next, and the events of their requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.engine.computing import NO_TOKEN, SampledToken, SampledTokens
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.instance_state import Load
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.sched.block_tables import BlockMemory
from epd_serve.sched.orders import Order
from epd_serve.sched.queues import KVLostError, Queues
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import PLACEHOLDER, FinishReason, Sequence, SequenceState
from epd_serve.sched.step_cost import StepCost
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer

logger = logging.getLogger(__name__)

_NO_NUMBERS = (
    "no token can be chosen: the logits of this request are no numbers. The model's numbers are too large for its "
    "dtype (try dtype: float32), its weights are damaged, or something was read before the device had computed "
    "it, for want of an event"
)

_ALL_FORBIDDEN = (
    "no token is allowed next: the request's structure, allowed_token_ids, bad_words and min_tokens contradict "
    "each other"
)


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """A sequence has a new token; with ``finish_reason`` it was the last one and its blocks are free again.

    ``logprobs`` are the ones that were asked for of the tokens before it, by index
    (:attr:`Sequence.wanted_logprobs`).
    """

    sequence: Sequence
    token: SampledToken
    finish_reason: FinishReason | None
    logprobs: Mapping[int, TokenLogprob] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A prompt that continues on another instance: each choice's first token, and whether it was the last."""

    sequence: Sequence
    tokens: list[tuple[SampledToken, FinishReason | None]]


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A step failed with this request in it; its blocks are free again."""

    request_id: str
    error: ServeError


EngineEvent = TokenEvent | PromptEvent | FailureEvent


class EngineHooks:
    """An engine's calls to the instance around it: features, pacing, and the events of its steps.

    The engine's thread makes them all unless they say otherwise, and none may block except ``feature`` and
    ``turn``. A class that derives from this one begins with no features, no pacing and no receiver of events.
    """

    def feature(self, mm_hash: str) -> Any | None:
        """Encoder output [tokens, width] for a step that needs it now; may fetch it first. None: there is none."""
        return None

    def has_feature(self, mm_hash: str) -> bool:
        """Return whether the feature is here or can be fetched, so that ``feature`` is worth calling."""
        return self.feature(mm_hash) is not None

    def feature_starved(self, mm_hash: str) -> None:
        """Called when a sequence could be computed if its feature were here."""

    def turn(self) -> AbstractContextManager[None]:
        """A context around the launch of each step; entering it waits for the step's turn on the device."""
        return nullcontext()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Called after a step with its seconds, less the part in which the device was at the step before."""

    def idle(self) -> None:
        """Called when nothing can be computed for now."""

    def failed(self) -> None:
        """Called when a step has failed, before its requests do; ends the process of a device that is lost."""

    def died(self) -> None:
        """Called when nothing will ever be computed again."""

    def emit(self, events: list[EngineEvent]) -> None:
        """Take the events of one step."""

    def freed(self) -> None:
        """Called when blocks, or places in the queue for them, are free, on the thread that gave them back."""


class Engine:
    """Owns the block pool and all sequences of an instance. Safe from any thread.

    A :class:`~epd_serve.engine.step_loop.StepLoop` asks it for steps and gives it their tokens. A token of a step
    that was launched before an earlier token ended its sequence is dropped. Blocks stay with a sequence until no
    launched step uses them.

    Args:
        sender: announces the KV of prompts that are handed on; their blocks stay until its last read.
        order: of admission; by default first come, first served.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: BlockMemory,
        budget: Budget,
        hooks: EngineHooks,
        *,
        eos_token_ids: frozenset[int],
        sender: KVSender | None = None,
        order: Order | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._hooks = hooks
        self._sender = sender
        self._clock = clock
        self.eos_token_ids = eos_token_ids
        self.queues = Queues(pool, memory, budget, order or Order("fcfs", pool, budget, StepCost()), hooks)
        self._tables = self.queues.tables
        self.check_fits, self.prefix_lookups = self._tables.check_fits, self._tables.prefix_lookups
        self._changed = threading.Condition()
        self._leaving: dict[Sequence, None] = {}  # ABORTED, but a step or a copy may still use their blocks
        self.transfers: dict[Sequence, OutgoingTransfer] = {}
        self._stepping: frozenset[Sequence] = frozenset()
        self._closing = False

    def close(self) -> None:
        """Let no further step begin."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ requests in

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer | None = None) -> None:
        """Queue a prompt, as of now if it has no time; ``transfer``: where its KV goes to be decoded elsewhere."""
        with self._changed:
            sequence.arrival_s = sequence.arrival_s or self._clock()
            if transfer is not None:
                self.transfers[sequence] = transfer
            self.queues.submit(sequence)
            self._changed.notify_all()

    def resume(self, sequence: Sequence, blocks: RequestBlocks, tokens: list[tuple[int, bool]]) -> None:
        """Go on with a prompt, and its output, whose KV was read into ``blocks``.

        ``tokens``: each choice's next token, and whether that was its last.
        """
        with self._changed:
            self.queues.forget_reservation(blocks)
            sequence.arrival_s = self._clock()
            sequence.blocks, sequence.forks, sequence.states = blocks.root, blocks.forks, blocks.states
            sequence.num_computed = sequence.num_tokens
            sequence.move_to(SequenceState.RUNNING)
            self._tables.register(sequence)
            choices = self._tables.fork(sequence) if sequence.forks else [sequence]
            for choice, (token_id, finished) in zip(choices, tokens, strict=True):
                choice.output_ids.append(token_id)
                if finished:
                    self._retire(choice)
                else:
                    self.queues.run(choice)
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """Stop all sequences of a request; their blocks go back as soon as nothing uses them. Idempotent."""
        with self._changed:
            for sequence in self.queues.remove(request_id):
                self._leave(sequence)
            for sequence in [s for s in self.transfers if s.request_id == request_id]:
                if sequence.state is SequenceState.TRANSFERRING:
                    self._leave(sequence)

    def stop_sequence(self, sequence: Sequence) -> None:
        """End one choice early: a stop string was found in its text."""
        with self._changed:
            if self.queues.stop(sequence):
                self._leave(sequence)

    def transferred(self, sequence: Sequence) -> None:
        """Free a sequence's source blocks: the decode instance has them, or the request is gone. Idempotent."""
        with self._changed:
            if sequence.state is SequenceState.TRANSFERRING:
                self._retire(sequence)

    def wake(self) -> None:
        """Look again for something to compute: a feature, say, has come that a sequence may wait for."""
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ blocks for others

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float, priority: int = 0
    ) -> RequestBlocks | None:
        """Return blocks for a prompt computed elsewhere: see :meth:`~epd_serve.sched.queues.Queues.reserve`."""
        with self._changed:
            return self.queues.reserve(num_prompt_tokens, num_sequences, hashes, arrival_s, priority)

    def stop_reserving(self) -> None:
        """Let new prompts take blocks again: no reservation waits any more."""
        with self._changed:
            if self.queues.stop_reserving():
                self._changed.notify_all()

    def unreserve(self, blocks: RequestBlocks) -> None:
        with self._changed:
            self.queues.forget_reservation(blocks)
            self._tables.give_back(blocks.root, blocks.forks, blocks.states)
            self._changed.notify_all()
            self._hooks.freed()

    def load(self) -> Load:
        with self._changed:
            return Load(
                num_running=self.queues.num_running,
                num_waiting=self.queues.num_waiting,
                num_waiting_tokens=self.queues.num_waiting_tokens,
                free_blocks=self._pool.num_free,
                total_blocks=self._pool.capacity,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of the pool balance, and each sequence has a state of its own."""
        with self._changed:
            self.queues.check_integrity()

    # ------------------------------------------------------------------ steps

    def next_step(self, in_flight: ScheduleOutput | None) -> ScheduleOutput | None:
        """Wait for something to compute, or for nothing where a step is in flight. None: the engine is closed."""
        with self._changed:
            while not self._closing and not (output := self.plan(in_flight)) and in_flight is None:
                self._hooks.idle()
                self._changed.wait()
            return None if self._closing else output

    def plan(self, in_flight: ScheduleOutput | None) -> ScheduleOutput:
        """Return the next step, which may be empty; its sequences keep their blocks until it has ended."""
        stepping = in_flight.sequences if in_flight is not None else []
        with self._changed:
            while (output := self._plan()) is None:
                pass
            self._stepping = frozenset(stepping if output is in_flight else (*output.sequences, *stepping))
            if output.admitted or output.preempted:
                self._hooks.freed()  # a place in the queue for blocks, or blocks
        return output

    def _plan(self) -> ScheduleOutput | None:
        """Return the next step; None: a request has lost its KV and is gone, and there may be another step."""
        try:
            return self.queues.plan(self._clock())
        except KVLostError as error:
            logger.exception("the KV of request %s is lost", error.request_id)
            self.abort(error.request_id)
            failure = ServeError(f"the request's KV is lost: {error.__cause__}")
            self._hooks.emit([FailureEvent(error.request_id, failure)])
            self._hooks.freed()
            return None

    def advance(self, output: ScheduleOutput, *, placeholders: bool) -> None:
        """Count the tokens of a launched step as computed; ``placeholders`` stand for those it samples."""
        with self._changed:
            for sequence in output.decodes:
                sequence.num_computed += 1
                if placeholders:
                    sequence.output_ids.append(PLACEHOLDER)
            for sequence, count in output.prefills:
                sequence.num_computed += count
                is_computed = not sequence.num_uncomputed and not sequence.hand_off
                if placeholders and is_computed and sequence.num_sampled == 1:
                    sequence.output_ids.append(PLACEHOLDER)

    def finish(
        self, sampled: SampledTokens, output: ScheduleOutput, after: ScheduleOutput | None
    ) -> list[EngineEvent]:
        """Take the tokens of a step; ``after`` is the step that was launched since."""
        with self._changed:
            self._stepping = frozenset(after.sequences if after else ())
            without = [(s, t.token_id) for s, tokens in sampled for t in tokens if t.token_id < 0 and s.is_active]
            events = self._fail_without_token(without) if without else []
            for sequence, _ in output.prefills:
                # it may have lost its blocks to an older one since, or an earlier step of its own has failed
                if sequence.blocks and sequence.is_active:
                    self._tables.register(sequence)
            for sequence, tokens in sampled:
                if not sequence.is_active:
                    continue
                if sequence.hand_off:
                    self.queues.stop(sequence)
                    sequence.move_to(SequenceState.TRANSFERRING)
                    count = len(sequence.output_ids) + 1
                    ends = [(t, sequence.finish_reason(t.token_id, count, self.eos_token_ids)) for t in tokens]
                    events.append(PromptEvent(sequence, ends))
                elif sequence.output_ids:
                    events.append(self._append(sequence, tokens[0]))
                elif not sequence.num_uncomputed:  # else it was preempted since, and its prompt is computed again
                    choices = self._tables.fork(sequence) if sequence.forks else [sequence]
                    for choice in choices[1:]:
                        self.queues.run(choice)
                    events += map(self._append, choices, tokens)
            if self._leaving:
                self._let_go()
        return events

    def fail(self, output: ScheduleOutput, other: ScheduleOutput | None, error: Exception) -> list[EngineEvent]:
        """End the requests of a failed step; ``other`` is a step that is still in flight."""
        with self._changed:
            self._stepping = frozenset(other.sequences if other else ())
            self._let_go()
            failure = ServeError(f"the engine failed in the middle of a step: {error}")
            return self._fail_requests(output.sequences, failure)

    def _fail_without_token(self, without: list[tuple[Sequence, int]]) -> list[EngineEvent]:
        """End requests for which no token can be chosen; those beside them go on."""
        events: list[EngineEvent] = []
        if lacking := {sequence for sequence, token_id in without if token_id == NO_TOKEN}:
            self._hooks.failed()
            logger.error("the logits of %d requests are no numbers", len(lacking))
            events += self._fail_requests(lacking, ServeError(_NO_NUMBERS))
        forbidden = {sequence for sequence, _ in without if sequence.is_active}
        for request_id in {sequence.request_id for sequence in forbidden}:
            self.abort(request_id)
            events.append(FailureEvent(request_id, InvalidRequest(_ALL_FORBIDDEN, code="contradiction")))
        return events

    def _fail_requests(self, sequences: Collection[Sequence], failure: ServeError) -> list[EngineEvent]:
        """End the sequences' requests. No other request finds their KV, which may be why."""
        for sequence in sequences:
            self._pool.forget(sequence.block_hashes)
        failed = {sequence.request_id for sequence in sequences}
        for request_id in failed:
            self.abort(request_id)
        return [FailureEvent(request_id, failure) for request_id in failed]

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenEvent:
        token_id, output_ids = token.token_id, sequence.output_ids
        if output_ids and output_ids[-1] == PLACEHOLDER:
            output_ids[-1] = token_id
        else:
            output_ids.append(token_id)
        reason = sequence.finish_reason(token_id, len(output_ids), self.eos_token_ids)
        if reason is not None:
            self.queues.stop(sequence)
            self._leave(sequence)
        logprobs = sequence.logprobs
        if sequence.wanted_logprobs:  # they go out once, with the token after them
            sequence.logprobs, sequence.wanted_logprobs = {}, range(0)
        return TokenEvent(sequence, token, reason, logprobs)

    # ------------------------------------------------------------------ leaving

    def _leave(self, sequence: Sequence) -> None:
        """Give a sequence up; its blocks follow in :meth:`_let_go`, when the current step and copies are done."""
        sequence.move_to(SequenceState.ABORTED)
        self._leaving[sequence] = None
        if sequence not in self._stepping:
            self._let_go()

    def _let_go(self) -> None:
        for sequence in [s for s in self._leaving if s not in self._stepping]:
            del self._leaving[sequence]
            transfer = self.transfers.get(sequence)
            if transfer is None or self._sender is None:
                self._retire(sequence)
            else:
                transfer.cancelled = True
                self._sender.fence(transfer, partial(self._retire, sequence))

    def _retire(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.move_to(SequenceState.FINISHED)
            self.transfers.pop(sequence, None)
            sequence.saved = None
            self._tables.release(sequence)
            self._changed.notify_all()
            self._hooks.freed()
