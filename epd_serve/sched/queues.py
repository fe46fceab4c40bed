"""The sequences of an engine between its steps: the waiting and the running ones, and who gives up blocks.

The order in which waiting sequences are admitted is a pure function of the queue and the time that returns a
permutation of ``waiting``. Preempted sequences come first in all of them, oldest first: clients have seen the
beginning of their answers. Among equals the order of the queue stays.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as AbstractSequence
from itertools import chain

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.protocol.wire import Load
from epd_serve.request import Sequence, SequenceState
from epd_serve.sched.block_tables import BlockMemory, BlockTables
from epd_serve.sched.language import Budget, ScheduleOutput, missing_span, possible_prefills, schedule

logger = logging.getLogger(__name__)

#: The waiting sequences in the order in which they are to be admitted, at a time (monotonic seconds). Pure.
Order = Callable[[AbstractSequence[Sequence], float], list[Sequence]]


class Queues:
    """Waiting, preempted and running sequences, and the blocks of the latter. Not thread-safe.

    A sequence is admitted with blocks for its prompt and takes more as it decodes. Where there are none, the
    youngest gives its own to an older one and goes on later. Blocks are given out in this order: to running
    sequences, oldest first; to preempted ones; to new prompts and to reservations by the time at which they came.
    A lower number as priority, as in vLLM, makes a sequence older among those that run, and among those that wait;
    a waiting one takes nothing from a running one, however urgent it is. Reservations have no priority.

    Args:
        has_feature: whether media could be computed now.
        on_starved: called with a feature that holds up a sequence which could be computed otherwise.
        on_lost: called with a request whose KV could not be saved or brought back; it must :meth:`remove` it.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: BlockMemory,
        budget: Budget,
        order: Order,
        *,
        has_feature: Callable[[str], bool],
        on_starved: Callable[[str], None],
        on_lost: Callable[[str, Exception], None],
    ) -> None:
        self.tables = BlockTables(pool, memory)
        self._pool = pool
        self._budget = budget
        self._order = order
        self._has_feature = has_feature
        self._on_starved = on_starved
        self._on_lost = on_lost
        self._watermark = max(pool.capacity // 100, 1)
        self._waiting: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []  # oldest first, likewise the running ones
        self._running: list[Sequence] = []
        self._held: dict[Sequence, Callable[[Sequence], None]] = {}  # no step begins with them any more
        self._reserving_since: float | None = None
        self._reserved: dict[int, list[int]] = {}  # contexts that are on their way, by id() of their blocks

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to be computed, of all sequences; not those that the cache holds for them now."""
        held = (*self._preempted, *self._running)
        return sum(s.num_uncomputed for s in held) + sum(s.num_tokens - self._num_cached(s) for s in self._waiting)

    def load(self) -> Load:
        return Load(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=self.num_waiting_tokens,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.capacity,
        )

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        """Let a RUNNING sequence, which has its blocks, take part in steps."""
        insort(self._running, sequence, key=_age)

    def stop(self, sequence: Sequence) -> bool:
        """Take a sequence that has output out of its queue; False if it is in none."""
        for queue in (self._running, self._preempted):
            if sequence in queue:
                queue.remove(sequence)
                return True
        return self._held.pop(sequence, None) is not None

    def remove(self, request_id: str) -> list[Sequence]:
        """Take all sequences of a request out of their queues."""
        removed: list[Sequence] = []
        for queue in (self._waiting, self._preempted, self._running):
            found = [s for s in queue if s.request_id == request_id]
            for sequence in found:
                queue.remove(sequence)
            removed += found
        held = [s for s in self._held if s.request_id == request_id]
        for sequence in held:
            del self._held[sequence]
        return removed + held

    def hold(self, request_id: str, held: Callable[[Sequence], None]) -> bool:
        """Take a request that decodes, with its blocks, out of the steps to come; ``held``: see :meth:`let_out`.

        Returns False for a request of several sequences, or one that has more to compute than its newest token.
        """
        found = [s for s in (*self._running, *self._preempted) if s.request_id == request_id]
        if len(found) != 1 or not found[0].blocks or not found[0].output_ids or found[0].num_uncomputed > 1:
            return False
        self._running.remove(found[0])
        self._held[found[0]] = held
        return True

    def let_out(self, stepping: Collection[Sequence]) -> None:
        """Call ``held`` for each held sequence that is not in ``stepping``; the sequence keeps its blocks."""
        for sequence in [s for s in self._held if s not in stepping]:
            sequence.move_to(SequenceState.TRANSFERRING)
            self._held.pop(sequence)(sequence)

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float
    ) -> RequestBlocks | None:
        """Blocks for a prompt whose KV comes from elsewhere, and for the token after it; None: not now.

        Then prompts that come after ``arrival_s`` wait behind it until :meth:`stop_reserving`. What would not fit
        into a step beside the others has no room either.
        """
        pace = self._budget.pace
        here, reserved = (*self._running, *self._preempted), list(chain.from_iterable(self._reserved.values()))
        num_before = len(here) + len(reserved)
        if (num_before and num_before + num_sequences > self._budget.max_num_seqs) or (
            pace is not None and not pace.has_room(here, num_prompt_tokens, reserved)
        ):
            self._reserving_since = arrival_s
            return None
        ahead = [s for s in self._waiting if s.arrival_s < arrival_s and self._ready_tokens(s)]
        needed = self._pool.num_missing(num_prompt_tokens, 1, num_sequences, hashes)
        needed += sum(map(self.tables.num_needed, (*self._preempted, *ahead)))
        if needed + (self._watermark if self._running else 0) > self._pool.num_free:
            self._reserving_since = arrival_s
            return None
        blocks = self._pool.allocate_request(num_prompt_tokens, 1, num_sequences, hashes)
        self._reserved[id(blocks)] = [num_prompt_tokens] * num_sequences
        return blocks

    def settle(self, blocks: RequestBlocks) -> None:
        """Forget a reservation that has become sequences, or was given back."""
        self._reserved.pop(id(blocks), None)

    def stop_reserving(self) -> None:
        """Note that no reservation waits any more: new prompts may take blocks again."""
        self._reserving_since = None

    def plan(self, now: float) -> ScheduleOutput:
        """The next step; its sequences have the blocks that it needs, and the preempted none any more."""
        admitted: list[Sequence] = []
        preempted: list[Sequence] = []
        while True:
            output = schedule(
                self._running,
                self._admissible(now),
                self._budget,
                ready_tokens=self._ready_tokens,
                blocks_needed=self.tables.num_needed,
                blocks_freed=self.tables.num_freed,
                free_blocks=self._pool.num_free,
                watermark=self._watermark,
            )
            for sequence in output.preempted:
                self._guard(self._preempt, sequence)
            for sequence in output.admitted:
                self._guard(self._admit, sequence)
            admitted += output.admitted
            preempted += output.preempted
            here = [s for s in output.decodes if s.state is SequenceState.RUNNING]
            # One that was to give its blocks and was lost keeps them as long as a launched step uses them.
            decodes = [s for s in here if self.tables.grow(s)]
            running = [(s, count) for s, count in output.prefills if s.state is SequenceState.RUNNING]
            prefills = possible_prefills(running, self._has_feature)
            if prefills or here or not (output.admitted or output.preempted):
                return ScheduleOutput(decodes=decodes, prefills=prefills, admitted=admitted, preempted=preempted)
            # all of the budget went to a cached prefix or to what was lost: there may be work behind it

    def _admissible(self, now: float) -> list[Sequence]:
        """The sequences that wait for blocks, in the order in which they may take them."""
        new: Iterable[Sequence] = self._order(self._waiting, now) if self._waiting else ()
        if self._reserving_since is not None:
            new = [s for s in new if s.arrival_s < self._reserving_since]
        return sorted((*self._preempted, *new), key=_priority)

    def _admit(self, sequence: Sequence) -> None:
        (self._preempted if sequence in self._preempted else self._waiting).remove(sequence)
        sequence.move_to(SequenceState.RUNNING)
        self.run(sequence)
        self.tables.admit(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.tables.preempt(sequence)
        self._running.remove(sequence)
        sequence.move_to(SequenceState.WAITING)
        insort(self._preempted, sequence, key=_age)

    def _guard(self, move: Callable[[Sequence], None], sequence: Sequence) -> None:
        """KV that cannot be saved or brought back fails its request, and no other."""
        if sequence.state is SequenceState.ABORTED or sequence.state is SequenceState.FINISHED:
            return  # with a sequence of the same request, a moment ago
        try:
            move(sequence)
        except Exception as error:
            logger.exception("the KV of request %s is lost", sequence.request_id)
            self._on_lost(sequence.request_id, error)

    def _num_cached(self, sequence: Sequence) -> int:
        """Leading tokens that a sequence without blocks would find computed."""
        usable = sequence.reusable_hashes(self._pool.block_size)
        return len(self._pool.match(usable)) * self._pool.block_size

    def _ready_tokens(self, sequence: Sequence) -> int:
        """Leading tokens that can be computed now: up to the first feature that is needed and not here."""
        if not sequence.spans or sequence.saved is not None:
            return sequence.num_tokens
        computed = sequence.num_computed
        if sequence.state is SequenceState.WAITING:
            computed = self._num_cached(sequence)
        span = missing_span(sequence, computed, sequence.num_tokens, self._has_feature)
        if span is None:
            return sequence.num_tokens
        if span.start <= computed:
            self._on_starved(span.mm_hash)
        return max(span.start, computed)


def _priority(sequence: Sequence) -> int:
    return sequence.sampling.priority


def _age(sequence: Sequence) -> tuple[int, float, int]:
    """A sort key: the most urgent first, and of these the oldest."""
    return sequence.sampling.priority, sequence.arrival_s, sequence.index


#: A sequence that has waited for so many times TTFT_max goes before all that have not.
PATIENCE = 4.0


def was_preempted(sequence: Sequence) -> bool:
    return bool(sequence.output_ids)


def fcfs(waiting: AbstractSequence[Sequence], now: float) -> list[Sequence]:
    """First come, first served."""
    return sorted(waiting, key=lambda sequence: (not was_preempted(sequence), sequence.arrival_s))


def sjf(
    waiting: AbstractSequence[Sequence], now: float, *, uncached_tokens: Callable[[Sequence], int]
) -> list[Sequence]:
    """Shortest job first, by the prompt tokens that no cached prefix holds. Long prompts can starve under it."""

    def key(sequence: Sequence) -> tuple[bool, float]:
        if was_preempted(sequence):
            return False, sequence.arrival_s
        return True, uncached_tokens(sequence)

    return sorted(waiting, key=key)


def slack(
    waiting: AbstractSequence[Sequence], now: float, *, ttft_s: float, prefill_s: Callable[[Sequence], float]
) -> list[Sequence]:
    """Least slack first: what is left of TTFT_max when ``prefill_s``, a sequence's own prefill, is taken off it.

    Those whose slack is used up come last, oldest first: one that is too late anyway shall not make others late.
    No one starves: who has waited ``PATIENCE * ttft_s`` comes before all but those who arrived still earlier.
    """

    def key(sequence: Sequence) -> tuple[int, float]:
        waited = now - sequence.arrival_s
        if was_preempted(sequence):
            return 0, sequence.arrival_s
        if waited >= PATIENCE * ttft_s:
            return 1, sequence.arrival_s
        left = ttft_s - waited - prefill_s(sequence)
        return (2, left) if left >= 0 else (3, sequence.arrival_s)

    return sorted(waiting, key=key)
