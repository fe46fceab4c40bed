"""The waiting and running sequences of an engine, their admission and preemption."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence as AbstractSequence
from operator import attrgetter

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.sched.block_tables import BlockMemory, BlockTables
from epd_serve.sched.schedule import Budget, Features, ScheduleOutput, possible_prefills, ready_tokens, schedule
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.step_cost import StepCost
from epd_serve.types import MediaSpan

#: A sequence goes first after waiting for this many times TTFT_max.
PATIENCE = 4.0
_PRIORITY = attrgetter("sampling.priority")
#: Sort key: most urgent first, then oldest.
_AGE = attrgetter("sampling.priority", "arrival_s", "index")


class KVLostError(Exception):
    """The KV of a request could not be saved or restored: abort it and plan again."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the KV of request {request_id} is lost")
        self.request_id = request_id


class Order:
    """The order of ``batching.order``. Preempted sequences, which have output, always come first.

    * ``fcfs``: by arrival.
    * ``sjf``: fewest uncached prompt tokens first; long prompts can starve.
    * ``slack``: least remaining time until TTFT_max first, minus the sequence's own prefill. Late sequences come
      last, oldest first, so they delay no others; after ``PATIENCE * ttft_s`` they come first, so none starves.

    Args:
        cost: cost of steps within the budget.
        ttft_s: TTFT_max, for ``slack``.
    """

    def __init__(
        self, name: str, pool: BlockPool, budget: Budget, cost: StepCost, ttft_s: float | None = None
    ) -> None:
        assert name != "slack" or ttft_s is not None, "the order slack needs a limit on TTFT"
        self._name, self._pool, self._budget, self._cost = name, pool, budget, cost
        self._ttft_s = ttft_s or 0.0

    def sort(self, waiting: AbstractSequence[Sequence], now: float) -> list[Sequence]:
        """Return ``waiting`` in the order of admission at ``now`` (monotonic seconds).

        Reads the pool, so it needs the engine's lock.
        """
        return sorted(waiting, key=lambda sequence: self._rank(sequence, now))

    def _rank(self, sequence: Sequence, now: float) -> tuple[int, float]:
        if sequence.output_ids or self._name == "fcfs":
            return (0 if sequence.output_ids else 1), sequence.arrival_s
        block_size = self._pool.block_size
        start = len(self._pool.match(sequence.reusable_hashes(block_size))) * block_size
        count = sequence.num_prompt_tokens - start
        if self._name == "sjf":
            return 1, count
        waited = now - sequence.arrival_s
        if waited >= PATIENCE * self._ttft_s:
            return 1, sequence.arrival_s
        steps = -(-count // self._budget.max_num_tokens)
        left = self._ttft_s - waited - steps * self._cost.base_s - self._cost.chunk_s(start, count)
        return (2, left) if left >= 0 else (3, sequence.arrival_s)


class SteadyDecodes:
    """Repeats a step of decodes without planning, as its needs are known."""

    def __init__(self, output: ScheduleOutput, block_size: int) -> None:
        decodes = output.decodes
        self._output = output
        self._block_size = block_size
        self._first, self._num_tokens = decodes[0], decodes[0].num_tokens  # at the last step
        self._number = 0
        self._end = min(s.max_tokens - len(s.output_ids) for s in decodes)  # when the first is complete
        self._lacking: defaultdict[int, list[Sequence]] = defaultdict(list)  # that need a block, by step number
        for sequence in decodes:
            room = len(sequence.blocks) * block_size - sequence.num_tokens
            self._lacking[room + 1].append(sequence)

    def next(self, tables: BlockTables) -> ScheduleOutput | None:
        """Return the next step, or None if it must be planned."""
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
    """Waiting, preempted and running sequences, and their blocks. Not thread-safe.

    A sequence is admitted with blocks for its prompt and takes more as it decodes. Running sequences get blocks
    first, then waiting ones by priority (lower first, as in vLLM); within a priority preempted sequences come
    before new prompts and reservations, which are served by arrival. A running sequence that finds no block
    preempts the last one, which continues later. A waiting sequence preempts nothing.

    ``features``: the encoder outputs that prompts need; set it before :meth:`plan` and :meth:`reserve`.
    """

    features: Features

    def __init__(self, pool: BlockPool, memory: BlockMemory, budget: Budget, order: Order) -> None:
        self.tables = BlockTables(pool, memory)
        self._pool = pool
        self._budget = budget
        self._order = order
        self._watermark = max(pool.capacity // 100, 1)
        self._waiting: deque[Sequence] = deque()
        self._preempted: list[Sequence] = []  # oldest first
        self._running: list[Sequence] = []  # oldest first
        self._steady: SteadyDecodes | None = None  # while the same sequences run
        self._reserving: tuple[int, float] | None = None  # priority and arrival of the waiting reservation
        self._reserved: dict[int, list[int]] = {}  # tokens of reserved sequences, by id() of their blocks

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_waiting_tokens(self) -> int:
        """Uncomputed tokens of all sequences, less those in the prefix cache."""
        held = (*self._preempted, *self._running)
        uncached = sum(s.num_tokens - self.tables.num_cached(s) for s in self._waiting)
        return sum(s.num_uncomputed for s in held) + uncached

    def first_item(self, sequence: Sequence) -> MediaSpan | None:
        """Return the media item whose feature the first step of a prompt without blocks needs, if any."""
        start = self.tables.num_cached(sequence)
        end = start + self._budget.max_num_tokens
        return next((span for span in sequence.spans if span.end > start and span.start < end), None)

    def check_integrity(self) -> None:
        """Raise AssertionError if the pool is inconsistent or sequences share a recurrent state."""
        self._pool.check_integrity()
        size, taken = self._pool.state_blocks, set[int]()
        for sequence in self._running:
            own = {block for state in sequence.states for block in state}
            assert len(own) == (size and size * (1 + len(sequence.forks))), "wrong number of state blocks"
            assert not own & taken and not own & set(sequence.blocks), "a state block is shared"
            taken |= own
        assert not any((*s.blocks, *s.states) for s in self._waiting), "a waiting sequence holds blocks"

    # ------------------------------------------------------------------ sequences

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        """Add a RUNNING sequence, which has its blocks, to the steps."""
        insort(self._running, sequence, key=_AGE)
        self._steady = None

    def stop(self, sequence: Sequence) -> bool:
        """Remove a sequence with output from its queue; return whether it was in one."""
        for queue in (self._running, self._preempted):
            if sequence in queue:
                queue.remove(sequence)
                self._steady = None
                return True
        return False

    def remove(self, request_id: str) -> list[Sequence]:
        """Remove all sequences of a request from their queues and return them."""
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
        """Return blocks for a prompt whose KV another instance computes and for the next token; None if not now.

        A refused reservation keeps its place: later prompts wait until it is granted or :meth:`stop_reserving` is
        called. The caller retries for the first reservation in its queue.
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

    def forget_reservation(self, blocks: RequestBlocks) -> None:
        """Forget a reservation whose blocks are in use or released."""
        self._reserved.pop(id(blocks), None)

    def stop_reserving(self) -> bool:
        """Let prompts after a refused reservation take blocks again; return whether there was one."""
        was_refused, self._reserving = self._reserving is not None, None
        return was_refused

    def _can_decode(self, num_tokens: int) -> bool:
        """Return whether one more sequence fits in the steps; further choices of a request may wait."""
        contexts = [s.num_tokens for s in (*self._running, *self._preempted) if not s.hand_off]
        contexts += [tokens for reserved in self._reserved.values() for tokens in reserved]
        pace = self._budget.pace
        return len(contexts) < self._budget.max_num_seqs and (
            pace is None or pace.has_room(len(contexts), sum(contexts), num_tokens)
        )

    def _ahead_of(self, priority: int, arrival_s: float) -> set[Sequence]:
        """Return the waiting sequences before a reservation, except those that wait for their first feature."""
        ahead = {s for s in self._preempted if s.sampling.priority <= priority}
        earlier = (s for s in self._waiting if (s.sampling.priority, s.arrival_s) <= (priority, arrival_s))
        return ahead.union(s for s in earlier if ready_tokens(s, self.tables, self.features))

    # ------------------------------------------------------------------ steps

    def plan(self, now: float) -> ScheduleOutput:
        """Return the next step, with blocks allocated for its sequences and taken from the preempted ones.

        Raises KVLostError for a request whose KV cannot be moved; all other sequences stay consistent.
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
                self.features,
                watermark=self._watermark,
            )
            for sequence in output.preempted:
                self._preempt(sequence)
            for sequence in output.admitted:
                self._admit(sequence)
            admitted += output.admitted
            preempted += output.preempted
            decodes = [s for s in output.decodes if self.tables.grow(s)]
            prefills = possible_prefills(output.prefills, self.features.has)
            if decodes or prefills or not (output.admitted or output.preempted):
                break
            # a cached prefix used up the budget: plan again
        output = ScheduleOutput(decodes=decodes, prefills=prefills, admitted=admitted, preempted=preempted)
        changes = prefills or admitted or preempted or self._waiting or self._preempted
        if not changes and 0 < len(decodes) == len(self._running):
            self._steady = SteadyDecodes(output, self._pool.block_size)
        return output

    def _admissible(self, now: float) -> list[Sequence]:
        """Return the sequences waiting for blocks, in order of admission."""
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
