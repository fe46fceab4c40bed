"""The sequences of an engine between its steps: who waits, who runs, and who gives up blocks."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from operator import attrgetter

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.sched.block_tables import BlockMemory, BlockTables
from epd_serve.sched.orders import Order
from epd_serve.sched.schedule import Budget, Features, ScheduleOutput, possible_prefills, ready_tokens, schedule
from epd_serve.sched.sequence import Sequence, SequenceState

_PRIORITY = attrgetter("sampling.priority")
#: A sort key: the most urgent first, and of these the oldest.
_AGE = attrgetter("sampling.priority", "arrival_s", "index")


class KVLostError(Exception):
    """The KV of a request could not be saved or brought back: abort it and plan again."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the KV of request {request_id} is lost")
        self.request_id = request_id


class SteadyDecodes:
    """Steps of the same decodes, one after another, whose needs are known beforehand."""

    def __init__(self, output: ScheduleOutput, block_size: int) -> None:
        decodes = output.decodes
        self._output = output
        self._block_size = block_size
        self._first, self._num_tokens = decodes[0], decodes[0].num_tokens  # when the last step was planned
        self._number = 0
        self._end = min(s.max_tokens - len(s.output_ids) for s in decodes)  # then one of them is complete
        self._lacking: defaultdict[int, list[Sequence]] = defaultdict(list)  # a block, by number of the step
        for sequence in decodes:
            room = len(sequence.blocks) * block_size - sequence.num_tokens
            self._lacking[room + 1].append(sequence)

    def next(self, tables: BlockTables) -> ScheduleOutput | None:
        """Return the next step, each sequence a token further; None: it has to be planned."""
        self._number += 1
        self._num_tokens += 1
        if self._number >= self._end or self._first.num_tokens != self._num_tokens:
            return None
        if lacking := self._lacking.pop(self._number, None):
            if not all(map(tables.grow, lacking)):
                return None
            self._lacking[self._number + self._block_size] += lacking
        return self._output


class Queues:
    """Waiting, preempted and running sequences, and the blocks of the latter. Not thread-safe.

    A sequence is admitted with blocks for its prompt and takes more as it decodes. Blocks go to running sequences
    first. Those that wait are served by priority, a lower number first as in vLLM; within a priority preempted
    sequences come first, then new prompts and reservations as they arrived. A running sequence that finds no block
    takes those of the last one behind it, which is preempted and continues later. A waiting sequence takes nothing
    from a running one.
    """

    def __init__(
        self, pool: BlockPool, memory: BlockMemory, budget: Budget, order: Order, features: Features
    ) -> None:
        self.tables = BlockTables(pool, memory)
        self._pool = pool
        self._budget = budget
        self._order = order
        self._features = features
        self._watermark = max(pool.capacity // 100, 1)
        self._waiting: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []  # oldest first, likewise the running ones
        self._running: list[Sequence] = []
        self._steady: SteadyDecodes | None = None  # while the same sequences run
        self._reserving: tuple[int, float] | None = None  # priority and arrival of the reservation that waits
        self._reserved: dict[int, list[int]] = {}  # tokens of each sequence to come, by id() of its blocks

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to be computed, of all sequences; not those that the cache holds for them now."""
        held = (*self._preempted, *self._running)
        uncached = sum(s.num_tokens - self.tables.num_cached(s) for s in self._waiting)
        return sum(s.num_uncomputed for s in held) + uncached

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of the pool balance, and each sequence has a state of its own."""
        self._pool.check_integrity()
        size, taken = self._pool.state_blocks, set[int]()
        for sequence in self._running:
            own = {block for state in sequence.states for block in state}
            assert len(own) == (size and size * (1 + len(sequence.forks))), "a state has too few or many blocks"
            assert not own & taken and not own & set(sequence.blocks), "a state's block is another's as well"
            taken |= own
        assert not any((*s.blocks, *s.states) for s in self._waiting), "a sequence that waits holds blocks"

    # ------------------------------------------------------------------ sequences come and go

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        """Let a RUNNING sequence, which has its blocks, take part in steps."""
        insort(self._running, sequence, key=_AGE)
        self._steady = None

    def stop(self, sequence: Sequence) -> bool:
        """Take a sequence that has output out of its queue; return whether it was in one."""
        for queue in (self._running, self._preempted):
            if sequence in queue:
                queue.remove(sequence)
                self._steady = None
                return True
        return False

    def remove(self, request_id: str) -> list[Sequence]:
        """Take all sequences of a request out of their queues."""
        queues = (self._waiting, self._preempted, self._running)
        removed = [(queue, s) for queue in queues for s in queue if s.request_id == request_id]
        for queue, sequence in removed:
            queue.remove(sequence)
        self._steady = None
        return [sequence for _, sequence in removed]

    # ------------------------------------------------------------------ reservations

    def reserve(
        self, num_prompt_tokens: int, num_sequences: int, hashes: list[bytes], arrival_s: float, priority: int = 0
    ) -> RequestBlocks | None:
        """Return blocks for a prompt whose KV comes from elsewhere, and for the token after it; None: not now.

        All blocks or none. A refused reservation holds its place in the queue: prompts behind it wait until
        :meth:`stop_reserving`, or until it is granted. The caller asks again for the first in the queue.
        """
        needed = self._pool.num_missing(num_prompt_tokens, 1, num_sequences, hashes)
        needed += sum(map(self.tables.num_needed, self._ahead_of(priority, arrival_s)))
        needed += self._watermark if self._running else 0
        if needed > self._pool.num_free or not self._can_decode(num_prompt_tokens):
            self._reserving = priority, arrival_s
            return None
        blocks = self._pool.allocate_request(num_prompt_tokens, 1, num_sequences, hashes)
        self._reserved[id(blocks)] = [num_prompt_tokens] * num_sequences
        return blocks

    def settle(self, blocks: RequestBlocks) -> None:
        """Forget a reservation that has become sequences, or was given back."""
        self._reserved.pop(id(blocks), None)

    def stop_reserving(self) -> bool:
        """Let prompts behind a refused reservation take blocks again; return whether there was one."""
        was_refused, self._reserving = self._reserving is not None, None
        return was_refused

    def _can_decode(self, num_tokens: int) -> bool:
        """Return whether a step has room for one more sequence; further choices of a request wait for theirs."""
        contexts = [s.num_tokens for s in (*self._running, *self._preempted) if not s.hand_off]
        contexts += [tokens for reserved in self._reserved.values() for tokens in reserved]
        pace = self._budget.pace
        return len(contexts) < self._budget.max_num_seqs and (
            pace is None or pace.has_room(len(contexts), sum(contexts), num_tokens)
        )

    def _ahead_of(self, priority: int, arrival_s: float) -> set[Sequence]:
        """Return the waiting sequences ahead of a reservation, but those that wait for their first feature."""
        ahead = {s for s in self._preempted if s.sampling.priority <= priority}
        earlier = (s for s in self._waiting if (s.sampling.priority, s.arrival_s) <= (priority, arrival_s))
        return ahead.union(s for s in earlier if ready_tokens(s, self.tables, self._features))

    # ------------------------------------------------------------------ steps

    def plan(self, now: float) -> ScheduleOutput:
        """Return the next step; its sequences have the blocks that it needs, and the preempted none any more.

        Raises KVLostError for a request whose blocks cannot be moved; whatever was moved before is in order.
        """
        is_steady = self._steady is not None and not self._waiting and not self._preempted
        if self._steady is not None and is_steady and (again := self._steady.next(self.tables)) is not None:
            return again
        self._steady = None
        admitted: list[Sequence] = []
        preempted: list[Sequence] = []
        while True:
            output = schedule(
                self._running,
                self._admissible(now),
                self._budget,
                self.tables,
                self._features,
                watermark=self._watermark,
            )
            for sequence in output.preempted:
                self._preempt(sequence)
            for sequence in output.admitted:
                self._admit(sequence)
            admitted += output.admitted
            preempted += output.preempted
            decodes = [s for s in output.decodes if self.tables.grow(s)]
            prefills = possible_prefills(output.prefills, self._features.has_feature)
            if decodes or prefills or not (output.admitted or output.preempted):
                break
            # all of the budget went to a cached prefix: there may be work behind it
        output = ScheduleOutput(decodes=decodes, prefills=prefills, admitted=admitted, preempted=preempted)
        changes = prefills or admitted or preempted or self._waiting or self._preempted
        if not changes and 0 < len(decodes) == len(self._running):
            self._steady = SteadyDecodes(output, self._pool.block_size)
        return output

    def _admissible(self, now: float) -> list[Sequence]:
        """Return the sequences that wait for blocks, in the order in which they may take them."""
        if not self._waiting and not self._preempted:
            return []
        waiting = sorted(self._preempted + self._order.sort(self._waiting, now), key=_PRIORITY)
        if self._reserving is None:
            return waiting
        ahead = self._ahead_of(*self._reserving)
        return [s for s in waiting if s in ahead]

    def _admit(self, sequence: Sequence) -> None:
        (self._preempted if sequence in self._preempted else self._waiting).remove(sequence)
        sequence.move_to(SequenceState.RUNNING)
        self.run(sequence)
        try:
            self.tables.admit(sequence)
        except Exception as error:
            raise KVLostError(sequence.request_id) from error

    def _preempt(self, sequence: Sequence) -> None:
        try:
            self.tables.preempt(sequence)
        except Exception as error:
            raise KVLostError(sequence.request_id) from error
        self._running.remove(sequence)
        sequence.move_to(SequenceState.WAITING)
        insort(self._preempted, sequence, key=_AGE)
