"""schedule(): within its budgets, decodes first, in order, and without touching its arguments."""

import copy
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from sequences import sequence as new_sequence

from epd_serve.sched.schedule import Budget, possible_prefills, schedule, schedule_encodes
from epd_serve.sched.sequence import SequenceState
from epd_serve.types import MediaSpan


def sequence(name, prompt, computed=0, output=0, *, grows=False):
    """Blocks hold one token here; one that ``grows`` has no block for its newest token."""
    blocks = list(range(prompt + output - grows)) if computed or output else []
    return new_sequence(prompt, name, computed=computed, output=output, blocks=blocks)


class Tables:
    """Blocks of one token."""

    def __init__(self, num_free):
        self.num_free = num_free

    def num_needed(self, one):
        return max(one.num_tokens - len(one.blocks), 0)

    def num_freed(self, one):
        return len(one.blocks)

    def num_cached(self, one):
        return 0


class Features:
    """All features but some."""

    def __init__(self, *missing):
        self.missing = missing
        self.asked_for = []

    def has(self, mm_hash):
        return mm_hash not in self.missing

    def starved(self, mm_hash):
        self.asked_for.append(mm_hash)


def run(running, waiting, *, tokens=32, seqs=8, features=None, free_blocks=1000, watermark=0):
    budget = Budget(max_num_tokens=tokens, max_num_seqs=seqs)
    return schedule(running, waiting, budget, Tables(free_blocks), features or Features(), watermark=watermark)


decoding = st.builds(sequence, st.uuids().map(str), st.just(3), st.just(3), st.just(1), grows=st.booleans())
prefilling = st.integers(2, 40).flatmap(
    lambda n: st.builds(sequence, st.uuids().map(str), st.just(n), st.integers(1, n - 1))
)
new = st.builds(sequence, st.uuids().map(str), st.integers(1, 40))


@given(
    running=st.lists(st.one_of(decoding, prefilling), max_size=12),
    waiting=st.lists(new, max_size=12),
    tokens=st.integers(1, 64),
    seqs=st.integers(1, 12),
    free_blocks=st.integers(0, 120),
    watermark=st.integers(0, 5),
)
def test_budgets_hold_and_arguments_stay(running, waiting, tokens, seqs, free_blocks, watermark):
    before = [(copy.copy(s.prompt_ids), s.num_computed, s.state, list(s.blocks)) for s in running + waiting]
    output = run(running, waiting, tokens=tokens, seqs=seqs, free_blocks=free_blocks, watermark=watermark)
    assert [(s.prompt_ids, s.num_computed, s.state, s.blocks) for s in running + waiting] == before
    assert output.num_tokens <= tokens
    assert len(output.decodes) + len(output.prefills) <= seqs
    grown = sum(s.num_tokens - len(s.blocks) for s in output.decodes)
    freed = sum(len(s.blocks) for s in output.preempted)
    admitted = sum(s.num_prompt_tokens for s in output.admitted)
    assert grown + admitted <= free_blocks + freed
    assert not output.admitted or grown + admitted + watermark <= free_blocks or (not running and grown == 0)
    assert all(0 < count <= s.num_uncomputed for s, count in output.prefills)
    assert output.admitted == [s for s in waiting if s in output.admitted], "out of order"
    kept = [s for s in running if s not in output.preempted]
    num_decodable = sum(1 for s in kept if s.is_decoding)
    if free_blocks >= sum(s.num_tokens - len(s.blocks) for s in running if s.is_decoding):
        assert not output.preempted
        assert len(output.decodes) == min(num_decodable, tokens, seqs), "decodes come first"


@given(running=st.lists(st.one_of(decoding, prefilling), min_size=1, max_size=12), free_blocks=st.integers(0, 3))
def test_the_young_give_blocks_to_the_old(running, free_blocks):
    output = run(running, [sequence("new", 1)], tokens=1000, seqs=100, free_blocks=free_blocks)
    kept = running[: len(running) - len(output.preempted)]
    assert output.preempted == running[len(kept) :][::-1], "the youngest first, and no other"
    assert running[0] in kept
    stalled = [s for s in kept if s.is_decoding and s not in output.decodes]
    assert not stalled or stalled == [kept[-1]], "only who has nobody younger waits"
    computed = [*output.decodes, *(s for s, _ in output.prefills)]
    assert not any(s in computed for s in output.preempted)
    assert not (output.preempted and output.admitted)
    if output.preempted:
        last = len(output.preempted[-1].blocks)
        needed = sum(s.num_tokens - len(s.blocks) for s in output.decodes)
        assert free_blocks + sum(len(s.blocks) for s in output.preempted) - last < needed, "one too many"


def test_what_is_handed_over_keeps_its_blocks():
    grows, leaving, young = sequence("g", 3, 3, 1, grows=True), sequence("l", 9, 4), sequence("y", 3, 3, 1)
    leaving.hand_off = True
    output = run([grows, young, leaving], [], free_blocks=0)
    assert (output.preempted, output.decodes, output.prefills) == ([young], [grows], [(leaving, 5)])
    output = run([grows, leaving], [], free_blocks=0)
    assert (output.preempted, output.decodes, output.prefills) == ([], [], [(leaving, 5)])


def test_admission_leaves_blocks_for_growth_unless_nothing_runs():
    old, prompt = sequence("o", 3, 3, 1), sequence("p", 10)
    assert not run([old], [prompt], free_blocks=10, watermark=1).admitted
    assert run([old], [prompt], free_blocks=11, watermark=1).admitted == [prompt]
    assert run([], [prompt], free_blocks=10, watermark=1).admitted == [prompt]


def test_saved_kv_goes_on_as_a_decode():
    saved = new_sequence(5, computed=5, output=1, state=SequenceState.WAITING)
    output = run([], [saved])
    assert (output.admitted, output.decodes, output.prefills) == ([saved], [saved], [])


def test_a_prompt_is_computed_in_chunks_beside_decodes():
    decode, prompt = sequence("d", 3, 3, 1), sequence("p", 100)
    output = run([decode], [prompt], tokens=11)
    assert (output.decodes, output.prefills) == ([decode], [(prompt, 10)])


def test_text_before_a_missing_image_is_computed_and_the_image_blocks_nobody_else():
    blocked, partly, free = sequence("blocked", 20), sequence("partly", 20), sequence("free", 5)
    blocked.spans, partly.spans = [MediaSpan(0, 9, "b")], [MediaSpan(7, 9, "p")]
    features = Features("b", "p")
    output = run([], [blocked, partly, free], features=features)
    assert output.prefills == [(partly, 7), (free, 5)]
    assert features.asked_for == ["b"]


def test_a_run_that_attends_both_ways_is_never_cut():
    first, second = sequence("first", 20, 2), sequence("second", 20, 2)
    first.both_ways = second.both_ways = [(4, 12), (12, 16)]
    first.spans = [MediaSpan(4, 8, "here"), MediaSpan(12, 4, "missing")]

    def ends(*counts):
        prefills = possible_prefills(zip((first, second), counts, strict=False), {"here"}.__contains__)
        return [one.num_computed + count for one, count in prefills]

    assert ends(2, 2) == [4, 4]
    assert ends(9, 9) == [4, 4], "behind the text"
    first.num_computed = second.num_computed = 4
    assert ends(1, 1) == [12], "the first goes on, the second may wait"
    assert ends(10, 12) == [12, 16], "up to a feature that is missing"
    first.num_computed = 7
    assert ends(1) == [12], "behind a cached prefix that ends within the run"
    first.num_computed = 12
    assert ends(8, 8) == [12], "a run without its feature holds up nobody else"


def test_a_request_that_does_not_fit_is_not_overtaken():
    large, small = sequence("large", 20), sequence("small", 2)
    assert not run([], [large, small], free_blocks=19)


pictures = st.builds(SimpleNamespace, num_pixels=st.integers(1, 100))


@given(st.lists(pictures, max_size=20), st.integers(1, 200))
def test_encode_batches_are_prefixes_within_the_budget(waiting, budget):
    batch = schedule_encodes(waiting, budget)
    assert batch == waiting[: len(batch)]
    assert bool(batch) == bool(waiting)
    total = sum(p.num_pixels for p in batch)
    assert total <= budget or len(batch) == 1
    if len(batch) < len(waiting):
        assert total + waiting[len(batch)].num_pixels > budget
