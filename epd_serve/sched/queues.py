"""The sequences of an engine between its steps: the waiting and the running ones, and who gives up blocks.

While there are too few places and blocks, keys take turns, the requests of a key, and the choices of a request.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TypeVar

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.sched.block_tables import BlockMemory, BlockTables
from epd_serve.sched.schedule import Budget, ScheduleOutput, missing_span, possible_prefills, schedule
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sched.turns import (
    ANYBODY,
    Asker,
    Claim,
    Order,
    asker_of,
    claim_of,
    has_each_a_turn,
    in_turn,
    sequences_in_turn,
)

T = TypeVar("T")


logger = logging.getLogger(__name__)

_PRIORITY = attrgetter("sampling.priority")
#: A sort key: the most urgent first, and of these the oldest.
_AGE = attrgetter("sampling.priority", "arrival_s", "index")


class SteadyDecodes:
    """Steps of the same decodes, one after another: what each of them needs is known beforehand.

    Attributes:
        turns: the sequences that ran when the first of these steps was planned; all of them decode.
    """

    def __init__(self, turns: list[Sequence], output: ScheduleOutput, block_size: int) -> None:
        self.turns = turns
        self._output = output
        self._block_size = block_size
        self._first, self._num_tokens = turns[0], turns[0].num_tokens  # when the last step was planned
        self._number = 0
        self._end = min(s.max_tokens - len(s.output_ids) for s in turns)  # then one of them is complete
        self._lacking: defaultdict[int, list[Sequence]] = defaultdict(list)  # a block, by number of the step
        for sequence in turns:
            room = len(sequence.blocks) * block_size - sequence.num_tokens
            self._lacking[room + 1].append(sequence)

    def next(self, grow: Callable[[Sequence], bool]) -> ScheduleOutput | None:
        """The next step, each sequence a token further; None: it has to be planned. ``grow`` gives a block."""
        self._number += 1
        self._num_tokens += 1
        if self._number >= self._end or self._first.num_tokens != self._num_tokens:
            return None
        if lacking := self._lacking.pop(self._number, None):
            for sequence in lacking:
                if not grow(sequence):
                    return None
            self._lacking[self._number + self._block_size] += lacking
        return self._output


class Queues:
    """Waiting, preempted and running sequences, and the blocks of the latter. Not thread-safe.

    A sequence is admitted with blocks for its prompt and takes more as it decodes. Where there are none, the last
    in turn gives its own to an earlier one and goes on later. Blocks are given out in this order: to running
    sequences; to preempted ones; to new prompts and to reservations by the time at which they came. A lower number
    as priority, as in vLLM, makes a sequence older among those that run, and among those that wait, reservations
    included; however urgent, a waiting one takes nothing from a running one for that.

    Where there is too little for all, API keys take turns, the requests of a key take turns, and then the choices
    of a request (:func:`in_turn`). A reservation whose turn has come gets a place beside a full step:
    then the last in turn rest, and keep what they have, while others are computed. Where it lacks blocks, the last
    in turn behind it give theirs.

    Args:
        has_feature: whether media could be computed now.
        on_starved: called with a feature that holds up a sequence which could be computed otherwise.
        on_lost: called with a request whose KV could not be saved or brought back; it must :meth:`remove` it.

    Attributes:
        num_lacking: blocks for want of which a reservation was refused that waits; 0: there is none, or it was
            refused for want of a place.
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
        self._turns: list[Sequence] | None = None  # the running ones in turn, while they are the same
        self._steady: SteadyDecodes | None = None
        self._num_over = 0  # those that have come beside a full step, whose places others gave up
        self._reserving: tuple[Asker, float] | None = None  # who waits for a reservation, and when it came
        self.num_lacking = 0
        self._reserved: dict[int, list[Claim]] = {}  # claims of what is on its way, by id() of its blocks

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
        return sum(s.num_uncomputed for s in held) + sum(s.num_tokens - self._num_cached(s) for s in self._waiting)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of the pool balance, and each sequence has a state of its own."""
        self._pool.check_integrity()
        size, taken = self._pool.state_blocks, set[int]()
        for sequence in self._running:
            own = {block for state in sequence.states for block in state}
            assert len(own) == (size and size * (1 + len(sequence.forks))), (
                "a state has too few or too many blocks"
            )
            assert not own & taken and not own & set(sequence.blocks), "a state's block is another's as well"
            taken |= own
        assert not any((*s.blocks, *s.states) for s in self._waiting), "a sequence that waits holds blocks"

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        """Let a RUNNING sequence, which has its blocks, take part in steps."""
        insort(self._running, sequence, key=_AGE)
        self._turns = None

    def stop(self, sequence: Sequence) -> bool:
        """Take a sequence that has output out of its queue; False if it is in none."""
        for queue in (self._running, self._preempted):
            if sequence in queue:
                queue.remove(sequence)
                self._left()
                return True
        return False

    def remove(self, request_id: str) -> list[Sequence]:
        """Take all sequences of a request out of their queues."""
        removed: list[Sequence] = []
        for queue in (self._waiting, self._preempted, self._running):
            found = [s for s in queue if s.request_id == request_id]
            for sequence in found:
                queue.remove(sequence)
                self._left()
            removed += found
        return removed

    def reserve(
        self,
        num_prompt_tokens: int,
        num_sequences: int,
        hashes: list[bytes],
        arrival_s: float,
        asker: Asker = ANYBODY,
    ) -> RequestBlocks | None:
        """Blocks for a prompt whose KV comes from elsewhere, and for the token after it; None: not now.

        Then prompts whose turn comes after it wait behind it until :meth:`stop_reserving`. What would not fit into
        a step beside the others has no room either, unless it is its turn to have a place there.
        """
        claims = [Claim(asker, (math.inf, index), num_prompt_tokens) for index in range(num_sequences)]
        has_place = self._has_place(num_prompt_tokens)
        if not has_place and not self._has_turn(claims):
            self._reserving, self.num_lacking = (asker, arrival_s), 0
            return None
        needed = self._pool.num_missing(num_prompt_tokens, 1, num_sequences, hashes)
        if self._waiting or self._preempted:
            needed += sum(map(self.tables.num_needed, self._waiting_before(asker, arrival_s)))
        needed += self._watermark if self._running else 0
        if needed > self._pool.num_free:
            self._reserving, self.num_lacking = (asker, arrival_s), needed
            return None
        blocks = self._pool.allocate_request(num_prompt_tokens, 1, num_sequences, hashes)
        self._reserved[id(blocks)] = [replace(claim, age=(arrival_s, claim.age[1])) for claim in claims]
        self._num_over += 0 if has_place else num_sequences
        return blocks

    def in_turn(self, reservations: Iterable[tuple[Asker, T]]) -> list[T]:
        """Reservations that wait, given in the order in which they came, in that of their turns."""
        return [one for one in self._waiting_in_turn(reservations) if not isinstance(one, Sequence)]

    def _has_place(self, num_tokens: int) -> bool:
        """Whether one more may decode beside those that are here; the other choices of a request take turns."""
        contexts = [s.num_tokens for s in chain(self._running, self._preempted) if not s.hand_off]
        contexts += [claim.num_tokens for claim in chain.from_iterable(self._reserved.values())]
        if len(contexts) >= self._budget.max_num_seqs:
            return False
        pace = self._budget.pace
        return pace is None or pace.num_decodes([*contexts, num_tokens]) > len(contexts)

    def _has_turn(self, claims: list[Claim]) -> bool:
        """Whether these may decode in place of others that are here."""
        here = [claim_of(s) for s in chain(self._running, self._preempted) if not s.hand_off]
        places = in_turn([*here, *chain.from_iterable(self._reserved.values()), *claims])
        pace, most = self._budget.pace, self._budget.max_num_seqs
        if pace is not None:
            most = min(most, pace.num_decodes([claim.num_tokens for claim in places]))
        return set(map(id, claims)) <= set(map(id, places[:most]))

    def _waiting_in_turn(self, new: Iterable[tuple[Asker, T]]) -> list[T | Sequence]:
        """Preempted sequences and ``new`` ones, given in their order of arrival, as their turns come.

        The most urgent come first; of these the keys take turns, and have had those of requests that are not over.
        """
        begun = [*map(asker_of, self._running), *(claims[0].asker for claims in self._reserved.values())]
        num_requests = Counter(key for key, _ in {(asker.key, asker.request_id) for asker in begun})
        num_choices = Counter((asker.key, asker.request_id) for asker in begun)
        waiting: list[tuple[int, Asker, T | Sequence]] = []
        all_waiting: list[tuple[Asker, T | Sequence]] = [(asker_of(s), s) for s in self._preempted]
        all_waiting += new
        for asker, one in all_waiting:
            waiting.append((num_choices[asker.key, asker.request_id], asker, one))
            num_choices[asker.key, asker.request_id] += 1
        waiting.sort(key=itemgetter(0))  # the first choice of a request goes before the second of others
        turns: list[tuple[int, int, T | Sequence]] = []
        for _, asker, one in waiting:
            turns.append((asker.priority, num_requests[asker.key], one))
            num_requests[asker.key] += 1
        turns.sort(key=itemgetter(0, 1))
        return [one for _, _, one in turns]

    def _waiting_before(self, asker: Asker, arrival_s: float) -> list[Sequence]:
        """The sequences that wait for blocks and come before a reservation."""
        new: list[tuple[float, Asker, Sequence | None]] = [(arrival_s, asker, None)]
        new += [(s.arrival_s, asker_of(s), s) for s in self._waiting if self._ready_tokens(s)]
        new.sort(key=itemgetter(0))
        turns = self._waiting_in_turn([(asker, one) for _, asker, one in new])
        return [one for one in turns[: turns.index(None)] if one is not None]

    def settle(self, blocks: RequestBlocks) -> None:
        """Forget a reservation that has become sequences, or was given back."""
        self._reserved.pop(id(blocks), None)

    def stop_reserving(self) -> None:
        """Note that no reservation waits any more: new prompts may take blocks again."""
        self._reserving, self.num_lacking = None, 0

    def plan(self, now: float) -> ScheduleOutput:
        """The next step; its sequences have the blocks that it needs, and the preempted none any more."""
        steady = self._steady
        again = steady.next(self.tables.grow) if steady is not None and self._is_steady(steady.turns) else None
        if again is not None:
            return again
        output = self._plan(now)
        is_steady = output.decodes and not (output.prefills or output.admitted or output.preempted)
        turns, self._steady = self._turns, None
        if is_steady and turns is not None and len(turns) == len(output.decodes) and self._is_steady(turns):
            self._steady = SteadyDecodes(turns, output, self._pool.block_size)
        return output

    def _is_steady(self, turns: list[Sequence]) -> bool:
        """Whether nobody waits for a place or for blocks, and the same run as in ``turns``."""
        is_awaited = self._waiting or self._preempted or self._num_over or self.num_lacking
        return turns is self._turns and not is_awaited

    def _plan(self, now: float) -> ScheduleOutput:
        admitted: list[Sequence] = []
        preempted = self._give_way() if self.num_lacking else []
        while True:
            waiting = self._admissible(now)
            running, resting = self._places(waiting)
            output = schedule(
                running,
                waiting,
                self._budget,
                ready_tokens=self._ready_tokens,
                blocks_needed=self.tables.num_needed,
                blocks_freed=self.tables.num_freed,
                free_blocks=self._pool.num_free,
                watermark=self._watermark,
                resting=resting,
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
            chunks = [(s, count) for s, count in output.prefills if s.state is SequenceState.RUNNING]
            prefills = possible_prefills(chunks, self._has_feature)
            if prefills or here or not (output.admitted or output.preempted):
                return ScheduleOutput(decodes=decodes, prefills=prefills, admitted=admitted, preempted=preempted)
            # all of the budget went to a cached prefix or to what was lost: there may be work behind it

    def _admissible(self, now: float) -> list[Sequence]:
        """The sequences that wait for blocks, in the order in which they may take them."""
        if not self._waiting and not self._preempted:
            return []
        if len(self._waiting) == 1 and not self._preempted and self._reserving is None:
            return list(self._waiting)
        new = self._order(self._waiting, now)
        if self._reserving is not None:
            before = set(self._waiting_before(*self._reserving))
            turns = self._waiting_in_turn([(asker_of(s), s) for s in new])
            return [s for s in turns if s in before]
        keys, is_grouped = {s.sampling.key for s in new}, any(s.sampling.group for s in new)
        if not self._preempted and not is_grouped and len(keys) < 2:
            return sorted(new, key=_PRIORITY)
        return self._waiting_in_turn([(asker_of(s), s) for s in new])

    def _places(self, waiting: AbstractSequence[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that have a place in the next step, and the others; the last ones in turn last."""
        if self._turns is None and len(self._running) < 2:
            self._turns = list(self._running)
        elif self._turns is None:
            self._turns = sorted(sequences_in_turn(self._running), key=_PRIORITY)
        most, turns = self._budget.max_num_seqs, self._turns
        if not self._num_over and (len(turns) + len(waiting) <= most or self._are_older(turns, waiting[:most])):
            return turns, []
        coming: list[Sequence] = []
        free = self._pool.num_free - self._watermark
        for sequence in waiting[:most]:
            free -= self.tables.num_needed(sequence)
            if free < 0:
                break
            coming.append(sequence)
        places = sequences_in_turn([*turns, *coming])
        decoding = [s for s in places if s.is_decoding and s.state is SequenceState.RUNNING]
        most -= sum(1 for s in places[:most] if not s.is_decoding)  # prompts, and preempted ones that come back
        resting = decoding[max(1, min(most, len(decoding) - self._num_over)) :]
        out = set(resting)
        return [s for s in turns if s not in out], resting

    def _are_older(self, turns: list[Sequence], waiting: AbstractSequence[Sequence]) -> bool:
        """Whether all of ``turns`` have places, before any of ``waiting`` has one: none has to rest."""
        if len(turns) > self._budget.max_num_seqs or not has_each_a_turn([*turns, *waiting]):
            return False
        newest_s = max((s.arrival_s for s in turns), default=-math.inf)
        return all(s.arrival_s > newest_s for s in waiting)

    def _give_way(self) -> list[Sequence]:
        """Take blocks of the last in turn for a reservation that lacks them and comes before these."""
        assert self._reserving is not None
        asker, needed = self._reserving[0], self.num_lacking
        parties = {(s.sampling.key, s.sampling.group or s.request_id) for s in self._running}
        if len(parties) == len(self._running) and all(key == asker.key for key, _ in parties):
            return []  # all have had one turn, and it has none before theirs
        claims = in_turn([*map(claim_of, self._running), Claim(asker, (math.inf, 0), 0)])
        victims: list[Sequence] = []
        free = self._pool.num_free
        for claim in reversed(claims):
            if claim.item is None or free >= needed:
                break
            sequence: Sequence = claim.item
            if sequence.is_decoding and sequence.sampling.priority >= asker.priority:
                victims.append(sequence)
                free += self.tables.num_freed(sequence)
        if free < needed:
            return []  # it would be of no use
        for sequence in victims:
            # a peer writes into its blocks, so that what the device does to them has to be over
            self._guard(partial(self._preempt, saves=True), sequence)
        return victims

    def _left(self) -> None:
        """Count out one that took part in steps, or was to."""
        self._turns = None
        self._num_over = max(0, self._num_over - 1)

    def _admit(self, sequence: Sequence) -> None:
        (self._preempted if sequence in self._preempted else self._waiting).remove(sequence)
        sequence.move_to(SequenceState.RUNNING)
        self.run(sequence)
        self.tables.admit(sequence)

    def _preempt(self, sequence: Sequence, *, saves: bool = False) -> None:
        self.tables.preempt(sequence, saves=saves)
        self._running.remove(sequence)
        self._turns = None
        sequence.move_to(SequenceState.WAITING)
        insort(self._preempted, sequence, key=_AGE)

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
