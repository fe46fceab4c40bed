"""The step loop of an instance with a language model: admit, schedule, compute, hand out tokens, free blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import ServeError
from epd_serve.protocol.wire import Load
from epd_serve.request import PLACEHOLDER, Sequence, SequenceState
from epd_serve.sched.block_tables import BlockMemory
from epd_serve.sched.language import Budget, ScheduleOutput
from epd_serve.sched.queues import Order, Queues
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.types import KVMode
from epd_serve.worker.events import EngineEvent, FailureEvent, PromptEvent, TokenEvent
from epd_serve.worker.runner import LanguageRunner, StepResult
from epd_serve.worker.sampler import SampledToken
from epd_serve.worker.stepper import Flight, Stepper

logger = logging.getLogger(__name__)


class Engine:
    """Owns the block pool and all sequences of an instance; one thread steps them.

    All methods may be called from any thread. ``emit`` is called on the engine's thread, once after each step, and
    must not block. ``on_free`` is called on whichever thread gave blocks back.

    An engine that runs ahead launches a step before it knows the tokens of the one before: the device feeds them
    from one to the other, and placeholders stand for them here. A token beyond an end that only a token told of is
    dropped. Blocks stay with a sequence until no launched step uses them.

    Args:
        feature_of: a feature as it is needed for a step; it may fetch it first. None: it is not to be had now.
        has_feature: whether ``feature_of`` is worth asking; must not block.
        around_step, on_step: what each step's computation runs in; told of each step and the seconds it took.
        on_idle, on_death: told when nothing can be computed for now; when nothing ever will.
        runs_ahead: whether a step is launched before the tokens of the one before are known.
        order: of admission; first come, first served by itself.
        on_starved: told of a feature that holds up a sequence which could be computed otherwise; must not block.
        kv_mode, clock: how KV goes out; monotonic seconds, the sender's clock.
    """

    def __init__(
        self,
        runner: LanguageRunner,
        pool: BlockPool,
        budget: Budget,
        *,
        num_layers: int,
        eos_token_ids: frozenset[int],
        feature_of: Callable[[str], Tensor | None],
        has_feature: Callable[[str], bool] | None = None,
        on_starved: Callable[[str], None] = lambda mm_hash: None,
        memory: BlockMemory,
        block_nbytes: int,
        record_event: Callable[[], Callable[[], None]],
        sender: KVSender | None,
        kv_mode: KVMode = "grouped",
        emit: Callable[[list[EngineEvent]], None],
        on_free: Callable[[], None],
        around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_step: Callable[[ScheduleOutput, float], None] = lambda output, seconds: None,
        on_idle: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        order: Order = lambda waiting, now: list(waiting),
        runs_ahead: bool = False,
    ) -> None:
        self._pool = pool
        self.eos_token_ids = eos_token_ids
        self._queues = Queues(
            pool,
            memory,
            budget,
            order,
            has_feature=has_feature or (lambda mm_hash: feature_of(mm_hash) is not None),
            on_starved=on_starved,
            on_lost=self._lose,
        )
        self._tables = self._queues.tables
        self.check_fits, self.prefix_lookups = self._tables.check_fits, self._tables.prefix_lookups
        self._sender = sender
        self._emit = emit
        self._on_free = on_free
        self._on_step = on_step
        self._on_idle = on_idle
        self._on_death = on_death
        self._clock = clock
        self._changed = threading.Condition()
        self._leaving: dict[Sequence, None] = {}  # ABORTED, but a step or a copy may still use their blocks
        self._transfers: dict[Sequence, OutgoingTransfer] = {}
        self._stepper = Stepper(
            runner,
            feature_of=feature_of,
            transfers=self._transfers,
            sender=sender,
            kv_mode=kv_mode,
            num_layers=num_layers,
            block_size=pool.block_size,
            layer_bytes=block_nbytes // num_layers,
            record_event=record_event,
            around_step=around_step,
            clock=clock,
        )
        self._runs_ahead = runs_ahead
        self._flying: Flight | None = None  # launched, its tokens unknown
        self._stepping: frozenset[Sequence] = frozenset()
        self.num_steps, self.is_prefilling, self._closing = 0, False, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        if self._sender is not None:
            self._sender.close()

    # ------------------------------------------------------------------ requests in

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer | None = None) -> None:
        """Queue a prompt, as of now if it has no time; ``transfer``: where its KV goes to be decoded elsewhere."""
        with self._changed:
            sequence.arrival_s = sequence.arrival_s or self._clock()
            if transfer is not None:
                self._transfers[sequence] = transfer
            self._queues.submit(sequence)
            self._changed.notify_all()

    def resume(self, sequence: Sequence, blocks: RequestBlocks, tokens: list[tuple[int, bool]]) -> None:
        """Go on with a prompt whose KV another instance wrote into ``blocks``.

        Args:
            sequence: the first choice, WAITING; the KV of its output, if it has any, was written too.
            tokens: for each choice its next token and whether that was its last.
        """
        with self._changed:
            self._queues.settle(blocks)
            sequence.arrival_s = self._clock()
            sequence.blocks, sequence.forks = blocks.root, blocks.forks
            sequence.num_computed = sequence.num_tokens
            sequence.move_to(SequenceState.RUNNING)
            self._tables.register(sequence)
            choices = self._tables.fork(sequence)
            for choice, (token_id, finished) in zip(choices, tokens, strict=True):
                choice.output_ids.append(token_id)
                if finished:
                    self._retire(choice)
                else:
                    self._queues.run(choice)
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """Stop all sequences of a request; their blocks go back as soon as nothing uses them. Idempotent."""
        with self._changed:
            for sequence in self._queues.remove(request_id):
                self._leave(sequence)
            for sequence in [s for s in self._transfers if s.request_id == request_id]:
                if sequence.state is SequenceState.TRANSFERRING:
                    self._leave(sequence)

    def stop_sequence(self, sequence: Sequence) -> None:
        """End one choice early: a stop string was found in its text."""
        with self._changed:
            if self._queues.stop(sequence):
                self._leave(sequence)

    def hold(self, request_id: str, held: Callable[[Sequence], None]) -> bool:
        """See :meth:`~epd_serve.sched.queues.Queues.hold`; tells ``held`` on its thread, after all tokens."""
        with self._changed:
            self._changed.notify_all()
            return self._queues.hold(request_id, held)

    def transferred(self, sequence: Sequence) -> None:
        """The decode instance has confirmed, or nobody wants it: the source blocks may go. Idempotent."""
        with self._changed:
            if sequence.state is SequenceState.TRANSFERRING:
                self._retire(sequence)

    def wake(self) -> None:
        """Something that a waiting sequence may depend on (a feature) has come."""
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ blocks for others

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float
    ) -> RequestBlocks | None:
        """Blocks for a prompt whose KV a peer will write: see :meth:`~epd_serve.sched.queues.Queues.reserve`."""
        with self._changed:
            return self._queues.reserve(num_prompt_tokens, num_sequences, hashes, arrival_s)

    def stop_reserving(self) -> None:
        """No reservation waits any more."""
        with self._changed:
            self._queues.stop_reserving()
            self._changed.notify_all()

    def unreserve(self, blocks: RequestBlocks) -> None:
        with self._changed:
            self._queues.settle(blocks)
            self._pool.release(blocks.all())
            self._tell_free()

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and are computed."""
        return self._queues.num_running

    def load(self) -> Load:
        with self._changed:
            return self._queues.load()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of the pool balance."""
        with self._changed:
            self._pool.check_integrity()

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:  # nothing would be computed any more, and nobody would know
            logger.critical("the engine's thread has ended", exc_info=True)
            self._on_death()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closing and not (output := self._begin()) and self._flying is None:
                    self._on_idle()
                    self._changed.wait()
                if self._closing:
                    return
            self._compute(output)

    def step(self) -> bool:
        """One step, where no thread runs: for tests. False if there was nothing to compute or to wait for."""
        with self._changed:
            output, flying = self._begin(), self._flying
        self._compute(output)
        return bool(output) or flying is not None

    def _begin(self) -> ScheduleOutput:
        """The next step; its sequences keep their blocks until it has ended."""
        flying = self._flying.output if self._flying else ScheduleOutput()
        self._queues.let_out(flying.sequences)
        output = self._queues.plan(self._clock())
        self._stepping = frozenset((*output.sequences, *flying.sequences))
        self.is_prefilling = bool(output.prefills or flying.prefills)
        if output.admitted:
            self._on_free()  # no block, but a place in the queue for them
        return output

    def _compute(self, output: ScheduleOutput) -> None:
        """Launch a step and end the one before, if that still flies; end both unless the engine runs ahead."""
        before, self._flying = self._flying, None
        flight: Flight | None = None
        if output:
            with self._failing(output, before):
                flight = self._stepper.launch(output, before)
        if before is not None:
            self._land(before, flight)
        if flight is not None:
            with self._failing(flight.output, None):
                self._sample(flight)
                self._flying = flight
        if not self._runs_ahead and (flight := self._flying) is not None:
            self._flying = None
            self._land(flight, None)

    def _sample(self, flight: Flight) -> None:
        """Let the device choose the step's tokens, and take it for computed."""
        self._stepper.sample(flight)
        with self._changed:
            for sequence, count in (*((s, 1) for s in flight.output.decodes), *flight.output.prefills):
                sequence.num_computed += count
                if self._runs_ahead and sequence.yields_one_token:
                    sequence.output_ids.append(PLACEHOLDER)

    def _land(self, flight: Flight, after: Flight | None) -> None:
        """Wait for a step's tokens and hand them out; ``after`` is the step that was launched since."""
        events: list[EngineEvent] = []
        with self._failing(flight.output, after):
            events = self._finish_step(flight.output, self._stepper.read(flight), after)
            seconds = self._stepper.landed(flight)
            try:
                if flight.output:
                    self._on_step(flight.output, seconds)
            except Exception:  # what is told of a step must not take its tokens along
                logger.exception("a step could not be accounted for")
        self.num_steps += 1
        if events:
            self._emit(events)

    def _finish_step(self, output: ScheduleOutput, result: StepResult, after: Flight | None) -> list[EngineEvent]:
        with self._changed:
            self._stepping = frozenset(after.output.sequences if after else ())
            for sequence, _ in output.prefills:
                if sequence.blocks:  # it may have lost them to an older one since
                    self._tables.register(sequence)
            events: list[EngineEvent] = []
            for sequence, tokens in (*((s, [token]) for s, token in result.decoded), *result.first):
                if sequence.goes_on:
                    events += self._hand_out(sequence, tokens)
            self._let_go()
        return events

    def _hand_out(self, sequence: Sequence, tokens: list[SampledToken]) -> list[EngineEvent]:
        """A sequence's next token, or the first one of each choice."""
        if sequence.hand_off:
            self._queues.stop(sequence)
            sequence.move_to(SequenceState.TRANSFERRING)
            count = len(sequence.output_ids) + 1
            ends = [(t, sequence.finish_reason(t.token_id, count, self.eos_token_ids)) for t in tokens]
            return [PromptEvent(sequence, ends)]
        if sequence.output_ids:
            return [self._append(sequence, *tokens)]
        if sequence.num_uncomputed:
            return []  # it was preempted since, and its prompt is computed again
        choices = self._tables.fork(sequence)
        for choice in choices[1:]:
            self._queues.run(choice)
        return [self._append(choice, token) for choice, token in zip(choices, tokens, strict=True)]

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenEvent:
        sequence.take(token.token_id)
        reason = sequence.finish_reason(token.token_id, len(sequence.output_ids), self.eos_token_ids)
        if reason is not None:
            self._queues.stop(sequence)
            self._leave(sequence)
        return TokenEvent(sequence, token, reason, sequence.take_logprobs())

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
            transfer = self._transfers.get(sequence)
            if transfer is None or self._sender is None:
                self._retire(sequence)
            else:
                transfer.cancelled = True
                self._sender.fence(transfer, lambda _, s=sequence: self._retire(s))  # type: ignore[misc]

    def _retire(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.move_to(SequenceState.FINISHED)
            self._transfers.pop(sequence, None)
            sequence.saved = None
            self._tables.release(sequence)
            self._tell_free()

    def _tell_free(self) -> None:
        self._changed.notify_all()
        self._on_free()

    @contextmanager
    def _failing(self, output: ScheduleOutput, other: Flight | None) -> Iterator[None]:
        """A failed step must fail its requests, not the instance. ``other`` is one that still flies."""
        try:
            yield
        except Exception as error:
            logger.exception("a step of %d tokens failed", output.num_tokens)
            self._on_idle()
            with self._changed:
                failed = {sequence.request_id for sequence in output.sequences}
                self._stepping = frozenset(other.output.sequences if other else ())
                self._let_go()
            for request_id in failed:
                self.abort(request_id)
            failure = ServeError(f"the engine failed in the middle of a step: {error}")
            self._emit([FailureEvent(request_id, failure) for request_id in failed])

    def _lose(self, request_id: str, error: Exception) -> None:
        self.abort(request_id)
        self._emit([FailureEvent(request_id, ServeError(f"the request's KV is lost: {error}"))])
