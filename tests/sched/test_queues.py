"""Who gets blocks before whom, and what is lost with whom."""

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequences import sequence

from epd_serve.cache.block_pool import BlockPool
from epd_serve.sched import queues
from epd_serve.sched.queues import KVLostError, Order, Queues
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import SequenceState
from epd_serve.sched.step_cost import StepCost, StepPace
from epd_serve.types import MediaSpan, SamplingParams


class Memory:
    """Knows what was saved and brought back; may break."""

    num_restored = 0
    error = None

    def save(self, blocks):
        if self.error is not None:
            raise self.error
        return tuple(blocks)

    def restore(self, saved, first, blocks):
        if self.error is not None:
            raise self.error
        self.num_restored += 1


class Bench:
    """Queues over blocks of one token; all features are there."""

    def __init__(self, num_blocks, pace=None):
        self.pool = BlockPool(num_blocks + 1, 1)
        self.memory = Memory()
        self.lost = []
        budget = Budget(max_num_tokens=100, max_num_seqs=10, pace=pace)
        self.queues = Queues(self.pool, self.memory, budget, Order("fcfs", self.pool, budget, StepCost()))
        self.queues.features = Mock()

    def plan(self):
        while True:
            try:
                return self.queues.plan(0.0)
            except KVLostError as error:
                self.lost.append(error.request_id)
                for sequence in self.queues.remove(error.request_id):
                    sequence.move_to(SequenceState.ABORTED)
                    self.queues.tables.release(sequence)

    def submit(self, name, arrival_s, num_tokens, *, here=True, priority=0):
        fields = {"sampling": SamplingParams(seed=0, priority=priority), "positions": () if here else None}
        submitted = sequence(num_tokens, name, arrival_s=arrival_s, max_tokens=10, **fields)
        self.queues.submit(submitted)
        return submitted

    def step(self):
        """Names of those that were computed and of those that were preempted."""
        output = self.plan()
        computed = [(s, 1) for s in output.decodes] + output.prefills
        for one, count in computed:
            one.num_computed += count
            if one.num_uncomputed == 0:
                one.output_ids.append(5)
        self.pool.check_integrity()
        return [s.request_id for s, _ in computed], [s.request_id for s in output.preempted]

    def finish(self, sequence):
        assert self.queues.stop(sequence)
        sequence.move_to(SequenceState.FINISHED)
        self.queues.tables.release(sequence)


def test_the_preempted_come_before_reservations_and_those_before_younger_prompts():
    bench = Bench(10)
    old, young = bench.submit("old", 1.0, 4), bench.submit("young", 2.0, 3)
    assert bench.step() == (["old", "young"], [])
    assert bench.step() == (["old", "young"], [])
    assert bench.step() == (["old"], []), "the last block is the oldest's; the other keeps what it has"
    assert bench.step() == (["old"], ["young"])
    assert bench.queues.reserve(1, 1, [], 3.0) is None, "there would be room, but not for young too"
    late = bench.submit("late", 4.0, 1)
    assert bench.step() == (["old"], [])
    bench.finish(old)
    assert bench.step() == (["young"], []), "late is not admitted, though it would fit"
    assert late.state is SequenceState.WAITING
    assert bench.queues.reserve(1, 1, [], 3.0) is not None
    bench.queues.stop_reserving()
    bench.finish(young)
    assert bench.step() == (["late"], [])


def test_a_lower_number_as_priority_is_computed_before_older_ones_and_preempted_after_them():
    bench = Bench(12)
    bench.submit("old", 1.0, 4, priority=1)
    assert bench.step() == (["old"], [])
    urgent = bench.submit("urgent", 3.0, 4, priority=-1)
    bench.submit("usual", 2.0, 3)
    assert bench.step() == (["old", "urgent"], []), "what runs is not driven out by what waits"
    assert bench.step() == (["urgent", "old"], [])
    assert bench.step() == (["urgent"], [])
    assert bench.step() == (["urgent"], ["old"]), "the oldest of all"
    bench.finish(urgent)
    assert bench.step() == (["usual"], []), "what has begun is no exception"


def test_the_oldest_waits_only_for_blocks_of_what_does_not_run():
    bench = Bench(6)
    bench.submit("r", 1.0, 4)
    assert bench.step() == (["r"], [])
    reserved = bench.pool.allocate(1)
    assert bench.step() == (["r"], [])
    assert bench.step() == ([], []), "it keeps what it has"
    bench.pool.release(reserved)
    assert bench.step() == (["r"], [])


def test_kv_that_cannot_be_saved_or_brought_back_fails_its_request_alone():
    for breaks_at in ("save", "restore", None):
        bench = Bench(9)
        old, young = bench.submit("old", 1.0, 3, here=False), bench.submit("young", 2.0, 3, here=False)
        bench.step()
        bench.memory.error = MemoryError("full") if breaks_at == "save" else None
        while not bench.lost and young.state is not SequenceState.WAITING:
            assert "old" in bench.step()[0]
        bench.memory.error = MemoryError("full") if breaks_at == "restore" else None
        bench.step()
        bench.finish(old)
        bench.step()
        assert bench.lost == ([] if breaks_at is None else ["young"])
        if breaks_at is None:
            assert bench.memory.num_restored == 1
            assert young.saved is None
            bench.finish(young)
        assert bench.pool.num_free == bench.pool.capacity


def test_reservations_on_their_way_count_like_what_decodes():
    pace = StepPace(StepCost(base_s=0.01, sequence_s=0.01), 0.05)
    bench = Bench(1000, pace=pace)
    granted = [bench.queues.reserve(10, 1, [], 0.0) for _ in range(20)]
    blocks = [one for one in granted if one is not None]
    assert len(blocks) == 3, "a step of four takes 50 ms, and a prefill has to find its share"
    bench.queues.forget_reservation(blocks[0])
    assert bench.queues.reserve(10, 1, [], 0.0) is not None
    assert bench.queues.reserve(10, 1, [], 0.0) is None


def test_reservations_leave_no_more_sequences_than_a_step_takes():
    bench = Bench(100)
    bench.submit("r", 1.0, 2)
    bench.step()
    taken = [bench.queues.reserve(1, 4, [], 2.0), bench.queues.reserve(1, 5, [], 2.0)]
    assert None not in taken
    assert bench.queues.reserve(1, 1, [], 2.0) is None, "11 sequences, of which a step takes 10"
    assert taken[0] is not None
    bench.queues.forget_reservation(taken[0])
    assert bench.queues.reserve(1, 4, [], 2.0) is not None
    assert Bench(100).queues.reserve(1, 12, [], 1.0) is not None, "alone, its choices wait for each other"


def test_what_the_cache_holds_of_a_waiting_prompt_is_no_work():
    bench = Bench(10)
    hashes = [bytes([i]) * 32 for i in range(6)]
    block = bench.pool.allocate(1)
    for name, known in (("cold", []), ("warm", hashes)):
        bench.submit(name, 1.0, 6).block_hashes = known
    assert bench.queues.num_waiting_tokens == 12
    bench.pool.register(block[0], hashes[0])
    assert bench.queues.num_waiting_tokens == 11


@pytest.mark.parametrize(("start", "needed"), [(1, False), (2, True), (60, True), (102, True), (103, False)])
def test_the_first_step_of_a_prompt_needs_the_items_that_it_reaches(start, needed):
    bench = Bench(200)  # steps of 100 tokens
    block = bench.pool.allocate(3)
    hashes = [bytes([i]) * 32 for i in range(4)]
    for own, key in zip(block, hashes, strict=False):
        bench.pool.register(own, key)
    prompt = sequence(150, spans=[MediaSpan(start, 2, "picture")])
    prompt.block_hashes = hashes
    assert bench.queues.first_item(prompt) == (prompt.spans[0] if needed else None)


@given(
    st.lists(
        st.tuples(st.sampled_from(["prompt", "reservation"]), st.integers(1, 8), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    st.integers(9, 20),
)
def test_blocks_are_given_first_come_first_served_within_a_priority(arrivals, num_blocks):
    """Each is served, whatever its size, and no later one of its priority or a less urgent one before it."""
    bench = Bench(num_blocks)
    served, reservations, prompts = [], [], {}
    for number, (kind, size, priority) in enumerate(arrivals):
        if kind == "prompt":
            prompts[str(number)] = bench.submit(str(number), float(number), size, priority=priority)
        else:
            reservations.append((priority, float(number), size))
    reservations.sort()
    for _ in range(2 * len(arrivals)):
        granted = []
        while reservations:
            priority, arrival_s, size = reservations[0]
            if (blocks := bench.queues.reserve(size, 1, [], arrival_s, priority)) is None:
                break
            granted.append(blocks)
            served.append((priority, arrival_s))
            reservations.pop(0)
        if not reservations:
            bench.queues.stop_reserving()
        computed = [prompts[name] for name in dict.fromkeys(bench.step()[0])]
        served += [(one.sampling.priority, one.arrival_s) for one in computed]
        for one in computed:
            bench.finish(one)
        for blocks in granted:
            bench.queues.forget_reservation(blocks)
            bench.pool.release(blocks.all())
    assert len(served) == len(arrivals)
    kinds = {float(number): kind for number, (kind, _, _) in enumerate(arrivals)}
    for kind in ("prompt", "reservation"):
        of_kind = [one for one in served if kinds[one[1]] == kind]
        assert of_kind == sorted(of_kind)
    assert bench.pool.num_free == bench.pool.capacity


def test_steps_of_the_same_decodes_are_not_planned_again(monkeypatch):
    """Until one comes, or a block is missing that there is not."""
    bench, schedule = Bench(24), Mock(wraps=queues.schedule)
    monkeypatch.setattr(queues, "schedule", schedule)
    bench.submit("a", 0.0, 2)
    bench.submit("b", 1.0, 2)
    assert [bench.step() for _ in range(4)] == [(["a", "b"], [])] * 4
    assert schedule.call_count == 2, "the prompts, and the first decodes"
    bench.submit("c", 2.0, 2)
    assert [bench.step()[0] for _ in range(2)] == [["a", "b", "c"]] * 2
    assert schedule.call_count == 4
    while not (given_up := bench.step()[1]):
        pass
    assert given_up == ["c"], "the youngest gives its blocks"
    assert schedule.call_count == 5
