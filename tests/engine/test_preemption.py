"""Real models in a pool that is too small for what runs: tokens equal ``generate``, none lost, none repeated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from chips import CHIP, DEVICES, little_memory
from engine_bench import BLOCK_SIZE, EngineBench
from pictures import QUESTIONS
from reference import reference_of

from device.registry import get_device
from epd_serve.cache.block_pool import num_blocks_for
from epd_serve.engine.engine import EngineEvent, PromptEvent, TokenEvent
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence

MAX_TOKENS = 40
#: Each picture is in one of them: its feature goes with the request's first token.
ASKED = [*QUESTIONS[:3], QUESTIONS[4], *QUESTIONS[6:]]


class Held:
    """Features as an instance holds them: until the first token of the request that needs them."""

    def __init__(self, bench: EngineBench) -> None:
        self._bench = bench
        emit = bench.emit

        def emit_and_let_go(events: list[EngineEvent]) -> None:
            for event in events:
                if isinstance(event, TokenEvent | PromptEvent):
                    for span in event.sequence.spans:
                        bench.features.pop(span.mm_hash, None)
            emit(events)

        bench.emit = emit_and_let_go  # type: ignore[method-assign]


@cache
def _answers(path: Path) -> list[list[int]]:
    reference = reference_of(path)
    return [reference.generate(text, images, max_tokens=MAX_TOKENS) for text, images in ASKED]


@pytest.fixture
def expected(tiny_model: Path) -> list[list[int]]:
    return _answers(tiny_model)


@pytest.fixture(params=DEVICES)
def bench(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    device = get_device(request.param)
    budget = Budget(max_num_tokens=64, max_num_seqs=8)
    bench = EngineBench(tiny_model, budget, device=device, runs_ahead=device.type == "chip")
    with little_memory(request.param, 2.0):
        yield bench
        bench.close()


def longest(sequences: list[Sequence]) -> int:
    """Blocks of the longest of some sequences at its end."""
    return max(num_blocks_for(s.num_prompt_tokens + s.max_tokens, BLOCK_SIZE) for s in sequences)


@pytest.mark.parametrize(
    ("tiny_model", "bench"),
    [
        *(("qwen3_vl", "cpu"), ("gemma3", "cpu"), ("qwen3_5", "cpu"), ("llava", CHIP)),
        pytest.param("qwen3_5", CHIP, marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_concurrent_requests_in_a_tiny_pool(bench: EngineBench, expected: list[list[int]]) -> None:
    Held(bench)
    sequences = [
        bench.sequence(str(i), text, images, max_tokens=MAX_TOKENS) for i, (text, images) in enumerate(ASKED)
    ]
    bench.shrink(longest(sequences) + 4 + 2 * bench.pool.state_blocks)
    for _, images in ASKED:
        if images:
            bench.encode(images)
    for sequence in sequences:
        bench.engine.submit(sequence)
    answers = bench.collect(len(sequences))
    assert [answers[str(i), 0] for i in range(len(sequences))] == expected
    assert bench.num_preemptions > bench.num_saved > 0, "some are computed again, some saved"
    bench.check_idle()


@pytest.mark.parametrize("tiny_model", ["qwen3_vl"], indirect=True)
def test_choices_are_preempted_one_by_one(bench: EngineBench, tiny_model: Path) -> None:
    """Random draws with penalties: whatever a choice has seen and drawn so far is part of what goes on."""
    Held(bench)
    text, images = QUESTIONS[0]
    alone: dict[int, list[int]] = {}
    for attempt in range(2):
        bench.encode(images)
        sequence = bench.sequence(
            f"r{attempt}",
            text,
            images,
            max_tokens=40,
            n=3,
            temperature=0.9,
            seed=7,
            frequency_penalty=0.4,
            repetition_penalty=1.2,
        )
        if attempt:
            sequence.block_hashes = []  # no help from the prefix cache: all has to be saved
            bench.shrink(longest([sequence]) + 1)
        bench.engine.submit(sequence)
        answers = {index: ids for (_, index), ids in bench.collect(3).items()}
        bench.check_idle()
        alone = alone or answers
        assert bool(bench.num_preemptions) == bool(attempt)
    assert answers == alone
    assert len({tuple(ids) for ids in answers.values()}) == 3
