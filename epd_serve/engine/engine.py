"""Track sequences and their blocks from step to step, and pass events on to their requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol

import msgspec

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.instance_state import Load
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.sched.block_tables import BlockMemory
from epd_serve.sched.queues import KVLostError, Order, Queues
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import PLACEHOLDER, FinishReason, Sequence, SequenceState
from epd_serve.sched.step_cost import StepCost
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.types import MediaSpan

logger = logging.getLogger(__name__)

#: Sort key of requests for blocks.
_TURN = attrgetter("priority", "arrival_s")

_NO_NUMBERS = (
    "no token can be chosen: the logits of this request are NaN. The model's values overflow its dtype (try "
    "dtype: float32), its weights are damaged, or a missing event let something be read before the device had "
    "computed it"
)

_ALL_FORBIDDEN = (
    "no token is allowed next: the request's structure, allowed_token_ids, bad_words and min_tokens contradict "
    "each other"
)


#: Placeholder for a token that cannot be chosen because the logits are NaN.
NO_TOKEN = -1
#: Placeholder for the token of a sequence whose request forbids every token.
ALL_FORBIDDEN = -2


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: TokenLogprob | None = None


#: The tokens of a step: one per sequence, or the first tokens of all ``n`` choices after a prompt's last chunk.
SampledTokens = list[tuple[Sequence, list[SampledToken]]]


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """A new token of a sequence; with ``finish_reason`` it is the last one and the blocks are free again.

    ``logprobs``: requested log-probabilities of earlier tokens, by index (:attr:`Sequence.wanted_logprobs`).
    """

    sequence: Sequence
    token: SampledToken
    finish_reason: FinishReason | None
    logprobs: Mapping[int, TokenLogprob] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A prompt that continues on another instance: each choice's first token, and whether it is its last."""

    sequence: Sequence
    tokens: list[tuple[SampledToken, FinishReason | None]]


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A step failed with this request in it; its blocks are free again."""

    request_id: str
    error: ServeError


EngineEvent = TokenEvent | PromptEvent | FailureEvent


class Receiver(Protocol):
    """Takes the events of one request, on the event loop."""

    def feed(self, event: EngineEvent) -> None: ...


class Outbox:
    """Passes events from the engine's threads on to their requests, on the event loop that creates it.

    Attributes:
        receivers: takes the events of a request, by request id.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.receivers: dict[str, Receiver] = {}

    def emit(self, events: list[EngineEvent]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[EngineEvent]) -> None:
        for event in events:
            request_id = event.request_id if isinstance(event, FailureEvent) else event.sequence.request_id
            if (receiver := self.receivers.get(request_id)) is None:
                continue
            try:
                receiver.feed(event)
            except Exception as error:  # one failed answer must not affect the others
                logger.exception("the answer to request %s failed", request_id)
                receiver.feed(FailureEvent(request_id, ServeError(f"the answer cannot be written: {error}")))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BlockRequest:
    """Blocks wanted for a prompt whose KV another instance computes; see :meth:`Engine.reserve`.

    ``granted``: the blocks; None if the request ended before.
    """

    request_id: str
    num_prompt_tokens: int
    num_sequences: int
    hashes: list[bytes]
    priority: int
    arrival_s: float
    granted: Future[RequestBlocks | None] = field(default_factory=Future)


class Engine:
    """Owns the block pool and all sequences of an instance. Safe from any thread.

    A :class:`~epd_serve.engine.step_loop.StepLoop` requests steps from it and returns their tokens. If an earlier
    token ended the sequence, tokens of steps already launched are dropped. A sequence keeps its blocks until no
    launched step uses them.

    Args:
        outbox: takes the events of requests.
        sender: announces the KV of prompts that decode elsewhere; their blocks are kept until its last read.
        order: order of admission; default: first come, first served.

    Attributes:
        changed: the lock of all state, notified when there may be work.
        is_closing: set when no more steps may start.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: BlockMemory,
        budget: Budget,
        outbox: Outbox,
        *,
        eos_token_ids: frozenset[int],
        sender: KVSender | None = None,
        order: Order | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self.outbox = outbox
        self._sender = sender
        self._clock = clock
        self._budget = budget
        self.eos_token_ids = eos_token_ids
        self.queues = Queues(pool, memory, budget, order or Order("fcfs", pool, budget, StepCost()))
        self._tables = self.queues.tables
        self.check_fits, self.prefix_lookups = self._tables.check_fits, self._tables.prefix_lookups
        self.changed = threading.Condition()
        self._leaving: dict[Sequence, None] = {}  # ABORTED, but a step or a copy may still use their blocks
        self.transfers: dict[Sequence, OutgoingTransfer] = {}
        self._stepping: frozenset[Sequence] = frozenset()
        self._asking: list[BlockRequest] = []  # by priority, then arrival
        self._awaited: list[str] = []  # features of prompts that are submitted after them
        self.is_closing = False

    def close(self) -> None:
        """Prevent further steps."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    # ------------------------------------------------------------------ requests in

    def first_item(self, sequence: Sequence) -> MediaSpan | None:
        """Return the media item whose feature the first step of a new prompt needs, if any."""
        with self.changed:
            return self.queues.first_item(sequence)

    @contextmanager
    def awaiting(self, mm_hash: str) -> Iterator[None]:
        """Record a feature as starved when a step has room for its prompt, which is not submitted yet."""
        with self.changed:
            self._awaited.append(mm_hash)
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._awaited.remove(mm_hash)

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer | None = None) -> None:
        """Queue a prompt, arriving now if its time is unset; ``transfer``: where to send its KV for decoding."""
        with self.changed:
            sequence.arrival_s = sequence.arrival_s or self._clock()
            if transfer is not None:
                self.transfers[sequence] = transfer
            self.queues.submit(sequence)
            self.changed.notify_all()

    def resume(self, sequence: Sequence, blocks: RequestBlocks, tokens: list[tuple[int, bool]]) -> None:
        """Continue a prompt, and its output, whose KV was read into ``blocks``.

        ``tokens``: each choice's next token, and whether it is the last.
        """
        with self.changed:
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
            self._grant()
            self.changed.notify_all()

    def abort(self, request_id: str) -> None:
        """Stop all sequences of a request and free their blocks as soon as they are unused. Idempotent."""
        with self.changed:
            for sequence in self.queues.remove(request_id):
                sequence.is_cancelled = True
                self._leave(sequence)
            for sequence in [s for s in self.transfers if s.request_id == request_id]:
                if sequence.state is SequenceState.TRANSFERRING:
                    self._leave(sequence)
            for asked in tuple(self._asking):
                if asked.request_id == request_id:
                    self._asking.remove(asked)
                    asked.granted.set_result(None)
            self._grant()

    def stop_sequence(self, sequence: Sequence) -> None:
        """End one choice early, after a stop string in its text."""
        with self.changed:
            if self.queues.stop(sequence):
                self._leave(sequence)
                self._grant()

    def transferred(self, sequence: Sequence) -> None:
        """Free a sequence's source blocks after the transfer or the end of its request. Idempotent."""
        with self.changed:
            if sequence.state is SequenceState.TRANSFERRING:
                self._retire(sequence)
                self._grant()

    def wake(self) -> None:
        """Look again for work, for example after a feature has arrived."""
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ blocks for others

    def reserve(
        self, request_id: str, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], priority: int = 0
    ) -> BlockRequest:
        """Request blocks for a prompt computed elsewhere, granted by priority, then arrival, once they are free.

        Call :meth:`withdraw` unless the blocks are taken; :meth:`abort` ends the request without blocks.
        """
        with self.changed:
            asked = BlockRequest(
                request_id=request_id,
                num_prompt_tokens=num_prompt_tokens,
                num_sequences=num_sequences,
                hashes=hashes,
                priority=priority,
                arrival_s=self._clock(),
            )
            asked.granted.set_running_or_notify_cancel()  # a cancelled waiter leaves it alone
            insort(self._asking, asked, key=_TURN)
            self._grant()
        return asked

    def withdraw(self, asked: BlockRequest) -> None:
        """Give up waiting for blocks, or return those granted."""
        with self.changed:
            if asked in self._asking:
                self._asking.remove(asked)
                self._grant()  # it may have blocked others
            elif (blocks := asked.granted.result()) is not None:
                self.unreserve(blocks)

    def unreserve(self, blocks: RequestBlocks) -> None:
        with self.changed:
            self.queues.forget_reservation(blocks)
            self._tables.give_back(blocks.root, blocks.forks, blocks.states)
            self._grant()
            self.changed.notify_all()

    def _grant(self) -> None:
        """Give free blocks to the requests for blocks, in order; called whenever some become free."""
        while self._asking:
            first = self._asking[0]
            blocks = self.queues.reserve(
                first.num_prompt_tokens, first.num_sequences, first.hashes, first.arrival_s, first.priority
            )
            if blocks is None:
                return
            del self._asking[0]
            first.granted.set_result(blocks)
        if self.queues.stop_reserving():
            self.changed.notify_all()

    def load(self) -> Load:
        with self.changed:
            return Load(
                num_running=self.queues.num_running,
                num_waiting=self.queues.num_waiting,
                num_waiting_tokens=self.queues.num_waiting_tokens,
                free_blocks=self._pool.num_free,
                total_blocks=self._pool.capacity,
                num_refused=sum(asked.num_sequences for asked in self._asking),
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pool's accounting balances and sequences do not share states."""
        with self.changed:
            self.queues.check_integrity()

    # ------------------------------------------------------------------ steps

    def plan(self, in_flight: ScheduleOutput | None) -> ScheduleOutput:
        """Return the next step, possibly empty; its sequences keep their blocks until it ends."""
        stepping = in_flight.sequences if in_flight is not None else []
        with self.changed:
            while True:
                try:
                    output = self.queues.plan(self._clock())
                    break
                except KVLostError as error:  # fail its request and plan again
                    logger.exception("the KV of request %s is lost", error.request_id)
                    self.abort(error.request_id)
                    failure = ServeError(f"the request's KV is lost: {error.__cause__}")
                    self.outbox.emit([FailureEvent(error.request_id, failure)])
            self._stepping = frozenset(stepping if output is in_flight else (*output.sequences, *stepping))
            if output.admitted or output.preempted:
                self._grant()  # a place in the queue for blocks, or blocks
            if output.num_tokens < self._budget.max_num_tokens:
                for mm_hash in self._awaited:
                    if not self.queues.features.has(mm_hash):
                        self.queues.features.starved(mm_hash)
        return output

    def advance(self, output: ScheduleOutput, *, placeholders: bool) -> None:
        """Count the tokens of a launched step as computed; ``placeholders``: append one for each sampled token."""
        with self.changed:
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
        """Append the tokens of a step; ``after`` is the step launched since."""
        with self.changed:
            self._stepping = frozenset(after.sequences if after else ())
            without = [(s, t.token_id) for s, tokens in sampled for t in tokens if t.token_id < 0 and s.is_active]
            events = self._fail_without_token(without) if without else []
            for sequence, _ in output.prefills:
                # an older sequence may have taken its blocks since, or an earlier step may have failed
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
                elif not sequence.num_uncomputed:  # otherwise it was preempted since and recomputes its prompt
                    choices = self._tables.fork(sequence) if sequence.forks else [sequence]
                    for choice in choices[1:]:
                        self.queues.run(choice)
                    events += map(self._append, choices, tokens)
            if self._leaving:
                self._let_go()
            self._grant()
        return events

    def fail(self, output: ScheduleOutput, other: ScheduleOutput | None, error: Exception) -> list[EngineEvent]:
        """Fail the requests of a step; ``other`` is a step still in flight."""
        with self.changed:
            self._stepping = frozenset(other.sequences if other else ())
            self._let_go()
            failure = ServeError(f"the engine failed during a step: {error}")
            return self._fail_requests(output.sequences, failure)

    def _fail_without_token(self, without: list[tuple[Sequence, int]]) -> list[EngineEvent]:
        """Fail requests for which no token can be chosen; other requests continue."""
        events: list[EngineEvent] = []
        if lacking := {sequence for sequence, token_id in without if token_id == NO_TOKEN}:
            logger.error("the logits of %d requests are NaN", len(lacking))
            events += self._fail_requests(lacking, ServeError(_NO_NUMBERS))
        forbidden = {sequence for sequence, _ in without if sequence.is_active}
        for request_id in {sequence.request_id for sequence in forbidden}:
            self.abort(request_id)
            events.append(FailureEvent(request_id, InvalidRequest(_ALL_FORBIDDEN, code="contradiction")))
        return events

    def _fail_requests(self, sequences: Collection[Sequence], failure: ServeError) -> list[EngineEvent]:
        """Fail the sequences' requests and hide their KV from other requests, because it may be the cause."""
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
        if sequence.wanted_logprobs:  # sent once, with the token after them
            sequence.logprobs, sequence.wanted_logprobs = {}, range(0)
        return TokenEvent(sequence, token, reason, logprobs)

    # ------------------------------------------------------------------ leaving

    def _leave(self, sequence: Sequence) -> None:
        """Abort a sequence; :meth:`_let_go` frees its blocks when the current step and copies are done."""
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
                self._sender.fence(transfer, partial(self._sent, sequence))

    def _sent(self, sequence: Sequence) -> None:
        """Retire a sequence whose blocks the sender has ceased to read; may run on a thread of the sender."""
        with self.changed:
            self._retire(sequence)
            self._grant()

    def _retire(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.FINISHED)
        self.transfers.pop(sequence, None)
        sequence.saved = None
        self._tables.release(sequence)
        self.changed.notify_all()
