"""The step loop of an instance with a language model: admit, schedule, compute, hand out tokens, free blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence

from torch import Tensor

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.wire import Load
from epd_serve.request import Sequence, SequenceState
from epd_serve.sched.language import Budget, ScheduleOutput, missing_span, possible_prefills, schedule
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.types import KVMode
from epd_serve.worker.events import EngineEvent, FailureEvent, PromptEvent, TokenEvent
from epd_serve.worker.feature_supply import with_features
from epd_serve.worker.layer_groups import LayerGroups
from epd_serve.worker.runner import LanguageRunner, StepResult
from epd_serve.worker.sampler import SampledToken

logger = logging.getLogger(__name__)


class Engine:
    """Owns the block pool and all sequences of an instance; one thread steps them.

    All methods may be called from any thread. ``emit`` is called on the engine's thread, once after each step, and
    must not block. ``on_free`` is called on whichever thread gave blocks back.

    Args:
        feature_of: a feature as it is needed for a step; it may fetch it first. None: it is not to be had now.
        has_feature: whether ``feature_of`` is worth asking; must not block.
        on_step: told of each step and the seconds it took.
        order: the waiting sequences in the order in which they are to be admitted, at a time (monotonic seconds);
            pure. First come, first served by itself.
        on_starved: told of a feature that holds up a sequence which could be computed otherwise; must not block.
        kv_mode: how KV goes out.
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
        copy_block: Callable[[int, int], None],
        block_nbytes: int,
        record_event: Callable[[], Callable[[], None]],
        sender: KVSender | None,
        kv_mode: KVMode = "grouped",
        emit: Callable[[list[EngineEvent]], None],
        on_free: Callable[[], None],
        on_step: Callable[[ScheduleOutput, float], None] = lambda output, seconds: None,
        order: Callable[[AbstractSequence[Sequence], float], list[Sequence]] = lambda waiting, now: list(waiting),
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._budget = budget
        self._num_layers = num_layers
        self._eos_token_ids = eos_token_ids
        self._feature_of = feature_of
        self._has_feature = has_feature or (lambda mm_hash: feature_of(mm_hash) is not None)
        self._on_starved = on_starved
        self._copy_block = copy_block
        self._block_nbytes = block_nbytes
        self._record_event = record_event
        self._sender = sender
        self._kv_mode = kv_mode
        self._emit = emit
        self._on_free = on_free
        self._on_step = on_step
        self._order = order
        self._changed = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._leaving: dict[Sequence, None] = {}  # ABORTED, but a step or a copy may still use their blocks
        self._transfers: dict[Sequence, OutgoingTransfer] = {}
        self._stepping: frozenset[Sequence] = frozenset()
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
        """Raise InvalidRequest for a request that this pool could not hold even if it were empty."""
        needed = self._pool.num_needed(num_prompt_tokens, max_tokens, num_sequences)
        if needed > self._pool.capacity:
            raise InvalidRequest(
                f"the request needs {needed} KV blocks of {self._pool.block_size} tokens and the instance has "
                f"{self._pool.capacity}; ask for fewer max_tokens, a shorter prompt or a smaller n",
                param="max_tokens",
            )

    def submit(self, sequence: Sequence, transfer: OutgoingTransfer | None = None) -> None:
        """Queue a prompt; ``transfer`` says where its KV goes if another instance decodes."""
        with self._changed:
            sequence.arrival_s = time.monotonic()
            if transfer is not None:
                self._transfers[sequence] = transfer
            self._waiting.append(sequence)
            self._changed.notify_all()

    def resume(self, sequence: Sequence, blocks: RequestBlocks, tokens: list[tuple[int, bool]]) -> None:
        """Go on with a prompt whose KV another instance wrote into ``blocks``.

        Args:
            sequence: the first choice, WAITING, without output.
            tokens: for each choice its first token and whether that was its last.
        """
        with self._changed:
            sequence.arrival_s = time.monotonic()
            sequence.blocks, sequence.forks = blocks.root, blocks.forks
            sequence.num_computed = sequence.num_prompt_tokens
            sequence.move_to(SequenceState.RUNNING)
            self._register_blocks(sequence)
            choices = self._fork(sequence)
            for choice, (token_id, finished) in zip(choices, tokens, strict=True):
                choice.output_ids.append(token_id)
                if finished:
                    self._retire(choice)
                else:
                    self._running.append(choice)
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """Stop all sequences of a request; their blocks go back as soon as nothing uses them. Idempotent."""
        with self._changed:
            for sequence in [s for s in self._waiting if s.request_id == request_id]:
                self._waiting.remove(sequence)
                self._leave(sequence)
            for sequence in [s for s in self._running if s.request_id == request_id]:
                self._running.remove(sequence)
                self._leave(sequence)
            for sequence in [s for s in self._transfers if s.request_id == request_id]:
                if sequence.state is SequenceState.TRANSFERRING:
                    self._leave(sequence)

    def stop_sequence(self, sequence: Sequence) -> None:
        """End one choice early: a stop string was found in its text."""
        with self._changed:
            if sequence in self._running:
                self._running.remove(sequence)
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
        self, num_prompt_tokens: int, max_tokens: int, num_sequences: int, hashes: list[bytes]
    ) -> RequestBlocks | None:
        """Blocks for a request whose KV a peer will write; None where there are not enough now."""
        with self._changed:
            if not self._pool.can_allocate_request(num_prompt_tokens, max_tokens, num_sequences, hashes):
                return None
            return self._pool.allocate_request(num_prompt_tokens, max_tokens, num_sequences, hashes)

    def unreserve(self, blocks: RequestBlocks) -> None:
        with self._changed:
            self._free(blocks.all())

    def load(self) -> Load:
        with self._changed:
            return Load(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                num_waiting_tokens=sum(s.num_uncomputed for s in (*self._waiting, *self._running)),
                free_blocks=self._pool.num_free,
                total_blocks=self._pool.capacity,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of the pool balance."""
        with self._changed:
            self._pool.check_integrity()

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while True:
            with self._changed:
                output = self._schedule()
                while not output and not self._closing:
                    self._changed.wait()
                    output = self._schedule()
                if self._closing:
                    return
                self._stepping = frozenset((*output.decodes, *(s for s, _ in output.prefills)))
            output, features = with_features(output, self._feature_of)
            events = self._step(output, features)
            if events:
                self._emit(events)

    def _schedule(self) -> ScheduleOutput:
        """The next step."""
        while True:
            output = schedule(
                self._running,
                self._order(self._waiting, time.monotonic()),
                self._budget,
                ready_tokens=self._ready_tokens,
                blocks_needed=lambda s: self._pool.num_needed(s.num_prompt_tokens, s.room_tokens, s.num_forked),
                free_blocks=self._pool.num_free,
            )
            for sequence in output.admitted:
                self._admit(sequence)
            prefills = possible_prefills(output.prefills, self._has_feature)
            if prefills or output.decodes or not output.admitted:
                return ScheduleOutput(decodes=output.decodes, prefills=prefills)
            # all of the budget went to a cached prefix: there may be work behind it

    def _admit(self, sequence: Sequence) -> None:
        blocks = self._pool.allocate_request(
            sequence.num_prompt_tokens, sequence.room_tokens, sequence.num_forked, sequence.block_hashes
        )
        sequence.blocks, sequence.forks = blocks.root, blocks.forks
        sequence.num_registered = blocks.num_cached
        sequence.num_computed = blocks.num_cached * self._pool.block_size
        sequence.move_to(SequenceState.RUNNING)
        self._waiting.remove(sequence)
        self._running.append(sequence)

    def _ready_tokens(self, sequence: Sequence) -> int:
        """Leading tokens that can be computed now: up to the first feature that is needed and not here."""
        computed = sequence.num_computed
        if sequence.state is SequenceState.WAITING:
            usable = sequence.block_hashes[: (sequence.num_prompt_tokens - 1) // self._pool.block_size]
            computed = len(self._pool.match(usable)) * self._pool.block_size
        span = missing_span(sequence, computed, sequence.num_tokens, self._has_feature)
        if span is None:
            return sequence.num_tokens
        if span.start <= computed:
            self._on_starved(span.mm_hash)
        return max(span.start, computed)

    def _step(self, output: ScheduleOutput, features: dict[str, Tensor]) -> list[EngineEvent]:
        groups = self._layer_groups(output)
        start = time.monotonic()
        try:
            result = StepResult([], [])
            if output:
                result = self._runner.step(output, features, groups.on_layer if groups else None)
            if groups is not None:
                groups.on_computed()
            events = self._finish_step(output, result)
        except Exception as error:  # a failed step must fail its requests, not the instance
            logger.exception("a step of %d tokens failed", output.num_tokens)
            return self._fail_step(f"the engine failed in the middle of a step: {error}")
        if output:
            seconds = time.monotonic() - start
            self._on_step(output, seconds)
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
            clock=time.monotonic,
        )

    def _finish_step(self, output: ScheduleOutput, result: StepResult) -> list[EngineEvent]:
        with self._changed:
            for sequence, count in output.prefills:
                sequence.num_computed += count
                self._register_blocks(sequence)
            for sequence in output.decodes:
                sequence.num_computed += 1
            events = self._advance(result)
            self._stepping = frozenset()
            self._let_go()
        return events

    def _advance(self, result: StepResult) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for sequence, token in result.decoded:
            if sequence.state is SequenceState.RUNNING:
                events.append(self._append(sequence, token))
        for sequence, tokens in result.first:
            if sequence.state is not SequenceState.RUNNING:
                continue
            if sequence.hand_off:
                self._running.remove(sequence)
                sequence.move_to(SequenceState.TRANSFERRING)
                ends = [(t, sequence.finish_reason(t.token_id, 1, self._eos_token_ids)) for t in tokens]
                events.append(PromptEvent(sequence, ends))
                continue
            choices = self._fork(sequence)
            self._running += choices[1:]
            events += [self._append(choice, token) for choice, token in zip(choices, tokens, strict=True)]
        return events

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenEvent:
        sequence.output_ids.append(token.token_id)
        reason = sequence.finish_reason(token.token_id, len(sequence.output_ids), self._eos_token_ids)
        if reason is not None:
            self._running.remove(sequence)
            self._retire(sequence)
        return TokenEvent(sequence, token, reason)

    def _fork(self, root: Sequence) -> list[Sequence]:
        """All choices of a computed prompt: full prompt blocks shared, the last partial one copied."""
        shared = root.num_prompt_tokens // self._pool.block_size
        choices = [root]
        for index, own in enumerate(root.forks, start=1):
            self._pool.acquire(root.blocks[:shared])
            if root.num_prompt_tokens % self._pool.block_size:
                self._copy_block(root.blocks[shared], own[0])
            choices.append(root.fork(index, root.blocks[:shared] + own))
        root.forks = []
        return choices

    def _register_blocks(self, sequence: Sequence) -> None:
        computed = min(sequence.num_computed // self._pool.block_size, len(sequence.block_hashes))
        for i in range(sequence.num_registered, computed):
            self._pool.register(sequence.blocks[i], sequence.block_hashes[i])
        sequence.num_registered = max(sequence.num_registered, computed)

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
        blocks = sequence.blocks + [block for fork in sequence.forks for block in fork]
        sequence.blocks, sequence.forks = [], []
        self._free(blocks)

    def _free(self, blocks: Iterable[int]) -> None:
        self._pool.release(list(blocks))
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
