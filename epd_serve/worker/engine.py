"""The step loop of an instance with a language model: admit, schedule, compute, hand out tokens, free blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.wire import Load
from epd_serve.request import Sequence, SequenceState
from epd_serve.sched.block_tables import BlockMemory
from epd_serve.sched.language import Budget, ScheduleOutput
from epd_serve.sched.queues import Order, Queues
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.types import KVMode
from epd_serve.worker.events import EngineEvent, FailureEvent, PromptEvent, TokenEvent
from epd_serve.worker.layer_groups import LayerGroups
from epd_serve.worker.runner import LanguageRunner, StepResult
from epd_serve.worker.sampler import SampledToken
from epd_serve.worker.step_features import with_features

logger = logging.getLogger(__name__)


class Engine:
    """Owns the block pool and all sequences of an instance; one thread steps them.

    All methods may be called from any thread. ``emit`` is called on the engine's thread, once after each step, and
    must not block. ``on_free`` is called on whichever thread gave blocks back.

    Args:
        feature_of: a feature as it is needed for a step; it may fetch it first. None: it is not to be had now.
        has_feature: whether ``feature_of`` is worth asking; must not block.
        around_step, on_step: what each step's computation runs in; told of each step and the seconds it took.
        on_idle, on_death: told when nothing can be computed for now; when nothing ever will.
        order: of admission; first come, first served by itself.
        on_starved: told of a feature that holds up a sequence which could be computed otherwise; must not block.
        kv_mode: how KV goes out.
        clock: monotonic seconds, the sender's clock.
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
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._num_layers = num_layers
        self.eos_token_ids = eos_token_ids
        self._feature_of = feature_of
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
        self._block_nbytes = block_nbytes
        self._record_event = record_event
        self._sender = sender
        self._kv_mode = kv_mode
        self._emit = emit
        self._on_free = on_free
        self._around_step = around_step
        self._on_step = on_step
        self._on_idle = on_idle
        self._on_death = on_death
        self._clock = clock
        self._changed = threading.Condition()
        self._leaving: dict[Sequence, None] = {}  # ABORTED, but a step or a copy may still use their blocks
        self._transfers: dict[Sequence, OutgoingTransfer] = {}
        self._stepping: frozenset[Sequence] = frozenset()
        self.is_prefilling = False
        self._closing = False
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

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> None:
        """Raise InvalidRequest for a request that could not come to its end if it had all of the pool.

        Its choices can wait for each other, but each needs its first block at once.
        """
        needed = max(
            self._pool.num_needed(num_prompt_tokens, max_tokens),
            self._pool.num_needed(num_prompt_tokens, min(max_tokens, 1), num_sequences),
        )
        if needed > self._pool.capacity:
            raise InvalidRequest(
                f"the request needs {needed} KV blocks of {self._pool.block_size} tokens and the instance has "
                f"{self._pool.capacity}; ask for fewer max_tokens, a shorter prompt or a smaller n",
                param="max_tokens",
            )

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer | None = None) -> None:
        """Queue a prompt; ``transfer`` says where its KV goes if another instance decodes."""
        with self._changed:
            sequence.arrival_s = self._clock()
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

    def transferred(self, sequence: Sequence) -> None:
        """The decode instance has confirmed: the source blocks may go. Idempotent."""
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
        """Blocks for a prompt whose KV a peer will write, and for the first token after it; None: not now.

        Then prompts that come after ``arrival_s`` (monotonic) wait behind it until :meth:`stop_reserving`.
        """
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

    def load(self) -> Load:
        with self._changed:
            return Load(
                num_running=self._queues.num_running,
                num_waiting=self._queues.num_waiting,
                num_waiting_tokens=self._queues.num_waiting_tokens,
                free_blocks=self._pool.num_free,
                total_blocks=self._pool.capacity,
            )

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
                while not self._closing and not (output := self._begin()):
                    self._on_idle()
                    self._changed.wait()
                if self._closing:
                    return
            self._compute(output)

    def step(self) -> bool:
        """One step, where no thread runs: for tests. False if there was nothing to compute."""
        with self._changed:
            output = self._begin()
        if output:
            self._compute(output)
        return bool(output)

    def _begin(self) -> ScheduleOutput:
        """The next step; its sequences keep their blocks until it has ended."""
        output = self._queues.plan(self._clock())
        self._stepping = frozenset((*output.decodes, *(s for s, _ in output.prefills)))
        self.is_prefilling = bool(output.prefills)
        if output.admitted:
            self._on_free()  # no block, but a place in the queue for them
        return output

    def _compute(self, output: ScheduleOutput) -> None:
        output, features = with_features(output, self._feature_of)
        if events := self._step(output, features):
            self._emit(events)

    def _step(self, output: ScheduleOutput, features: dict[str, Tensor]) -> list[EngineEvent]:
        groups = self._layer_groups(output)
        start = self._clock()
        try:
            result = StepResult([], [])
            if output:
                with self._around_step():
                    result = self._runner.step(output, features, groups.on_layer if groups else None)
            if groups is not None:
                groups.on_computed()
            events = self._finish_step(output, result)
        except Exception as error:  # a failed step must fail its requests, not the instance
            logger.exception("a step of %d tokens failed", output.num_tokens)
            return self._fail_step(f"the engine failed in the middle of a step: {error}")
        if output:
            seconds = self._clock() - start
            try:
                self._on_step(output, seconds)
            except Exception:  # what is told of a step must not take its tokens along
                logger.exception("a step could not be accounted for")
            if output.prefills and self._sender is not None:
                self._sender.sizer.observe_compute(output.num_tokens, seconds)
        return events

    def _layer_groups(self, output: ScheduleOutput) -> LayerGroups | None:
        if self._sender is None:
            return None
        return LayerGroups(
            output,
            self._transfers,
            self._sender,
            mode=self._kv_mode,
            num_layers=self._num_layers,
            block_size=self._pool.block_size,
            layer_bytes=self._block_nbytes // self._num_layers,
            record_event=self._record_event,
            clock=self._clock,
        )

    def _finish_step(self, output: ScheduleOutput, result: StepResult) -> list[EngineEvent]:
        with self._changed:
            for sequence, count in output.prefills:
                sequence.num_computed += count
                self._tables.register(sequence)
            for sequence in output.decodes:
                sequence.num_computed += 1
            events = self._advance(result)
            self._stepping = frozenset()
            self._let_go()
        return events

    def _advance(self, result: StepResult) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for sequence, tokens in (*((s, [token]) for s, token in result.decoded), *result.first):
            if sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.hand_off:
                self._queues.stop(sequence)
                sequence.move_to(SequenceState.TRANSFERRING)
                count = len(sequence.output_ids) + 1
                ends = [(t, sequence.finish_reason(t.token_id, count, self.eos_token_ids)) for t in tokens]
                events.append(PromptEvent(sequence, ends))
                continue
            choices = [sequence] if sequence.output_ids else self._tables.fork(sequence)
            for choice in choices[1:]:
                self._queues.run(choice)
            events += map(self._append, choices, tokens)
        return events

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenEvent:
        sequence.output_ids.append(token.token_id)
        reason = sequence.finish_reason(token.token_id, len(sequence.output_ids), self.eos_token_ids)
        if reason is not None:
            self._queues.stop(sequence)
            self._retire(sequence)
        return TokenEvent(sequence, token, reason)

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
                self._sender.fence(transfer, lambda _, s=sequence: self._retire_later(s))  # type: ignore[misc]

    def _retire_later(self, sequence: Sequence) -> None:
        with self._changed:
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.FINISHED)
        self._transfers.pop(sequence, None)
        sequence.saved = None
        self._tables.release(sequence)
        self._tell_free()

    def _tell_free(self) -> None:
        self._changed.notify_all()
        self._on_free()

    def _fail_step(self, message: str) -> list[EngineEvent]:
        with self._changed:
            failed = {sequence.request_id for sequence in self._stepping}
            self._stepping = frozenset()
            self._let_go()
        for request_id in failed:
            self.abort(request_id)
        return [FailureEvent(request_id, ServeError(message)) for request_id in failed]

    def _lose(self, request_id: str, error: Exception) -> None:
        self.abort(request_id)
        self._emit([FailureEvent(request_id, ServeError(f"the request's KV is lost: {error}"))])
