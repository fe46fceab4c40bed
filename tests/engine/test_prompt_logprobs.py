"""Log-probabilities of known tokens are transformers', however the prompt is cut, cached or computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_bench import EngineBench as Bench
from reference import logprobs_of

from epd_serve.engine.engine import TokenEvent
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence

TEXT = "apple banana cherry " * 30  # more than one piece of logits


@pytest.fixture
def reference(tiny_model: Path) -> Any:
    return logprobs_of(tiny_model)


def scored(bench: Bench, name: str, first: int, output: list[int] | None = None, **sampling: Any) -> Sequence:
    sequence = bench.sequence(name, TEXT, [], logprobs=2, **sampling)
    sequence.output_ids += output or []
    sequence.wanted_logprobs = range(first, sequence.num_tokens)
    return sequence


def collect(bench: Bench, count: int) -> dict[str, TokenEvent]:
    """The events that bring log-probabilities, of ``count`` sequences that end."""
    told: dict[str, TokenEvent] = {}
    while count:
        event = bench.events.get(timeout=60)
        assert isinstance(event, TokenEvent), event
        if event.logprobs:
            assert event.sequence.request_id not in told
            told[event.sequence.request_id] = event
        count -= event.finish_reason is not None
    return told


def check(event: TokenEvent, ids: list[int], first: int, reference: Any) -> None:
    expected = reference(ids)
    assert sorted(event.logprobs) == list(range(first, len(ids)))
    for index, logprob in event.logprobs.items():
        row = expected[index - 1]
        assert logprob.logprob == pytest.approx(float(row[ids[index]]), abs=1e-4)
        best = row.topk(2)
        assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [token for token, _ in logprob.top] == best.indices.tolist()


@pytest.mark.parametrize("tiny_model", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize(("tokens", "runs_ahead"), [(7, True), (2048, False)])
def test_of_a_prompt_cut_into_chunks_cached_and_beside_others(
    tiny_model: Path, reference: Any, tokens: int, runs_ahead: bool
) -> None:
    bench = Bench(tiny_model, Budget(max_num_tokens=tokens, max_num_seqs=6), runs_ahead=runs_ahead)
    for round in range(2):  # the second time all of the prompt lies in the prefix cache
        whole, end = scored(bench, "whole", 1), scored(bench, "end", 50, [9, 8, 7], max_tokens=6)
        empty = scored(bench, "empty", 1, max_tokens=0)
        other = bench.sequence("other", TEXT, [], max_tokens=3)
        for sequence in (whole, other, end, empty):
            bench.engine.submit(sequence)
        told = collect(bench, 4)
        assert set(told) == {"whole", "end", "empty"}, round
        check(told["whole"], whole.prompt_ids, 1, reference)
        check(told["empty"], whole.prompt_ids, 1, reference)
        check(told["end"], [*end.prompt_ids, 9, 8, 7], 50, reference)
        bench.check_idle()
    bench.close()


@pytest.mark.parametrize("tiny_model", ["qwen2_5_vl"], indirect=True)
def test_of_prompts_that_lose_their_blocks_on_the_way(tiny_model: Path, reference: Any) -> None:
    """Blocks for one and a half of them, in steps of a few tokens."""
    bench = Bench(tiny_model, Budget(max_num_tokens=12, max_num_seqs=6))
    needed = bench.sequence("x", TEXT, []).num_prompt_tokens // 8 + 14
    bench.shrink(needed * 3 // 2)
    sequences = [scored(bench, f"r{i}", 1, max_tokens=100) for i in range(4)]
    for sequence in sequences:
        bench.engine.submit(sequence)
    told = collect(bench, 4)
    for sequence in sequences:
        check(told[sequence.request_id], sequence.prompt_ids, 1, reference)
    bench.check_idle()
    bench.close()
