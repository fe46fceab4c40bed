"""The engine in one process: equal to ``generate`` with chunked prefill, mixed batches, prefix reuse, aborts."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_bench import BLOCK_SIZE
from engine_bench import EngineBench as Bench
from pictures import QUESTIONS, noise
from reference import reference_of

from epd_serve.engine import pace
from epd_serve.engine.engine import FailureEvent, TokenEvent
from epd_serve.engine.telemetry import StageRates
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.sched.schedule import Budget, ScheduleOutput

TINY, LARGE = (7, 3), (2048, 64)
#: Token and sequence budgets, whether steps run ahead, and the model.
CASES = {
    **{f"tiny-budget-ahead-{kind}": (TINY, True, kind) for kind in (*tiny_models.KINDS, "qwen3_5")},
    "tiny-budget": (TINY, False, "qwen2_5_vl"),
    "large-budget": (LARGE, False, "qwen3_vl"),
    "large-budget-ahead": (LARGE, True, "llava"),
}
ALL = pytest.mark.parametrize("case", CASES, indirect=True)
#: Both loops, and a model with recurrent states.
SOME = pytest.mark.parametrize(
    "case", ["tiny-budget-ahead-qwen3_vl", "tiny-budget-ahead-qwen3_5", "large-budget"], indirect=True
)
ONE = pytest.mark.parametrize("case", ["tiny-budget-ahead-qwen2_5_vl"], indirect=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: tiny_models.make_tiny_model(kind, tmp_path_factory.mktemp("models") / kind))


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


@pytest.fixture
def tiny_model(case: Any, models: Callable[[str], Path]) -> Path:
    return models(case[2])


@pytest.fixture
def bench(case: Any, tiny_model: Path) -> Iterator[Bench]:
    (tokens, seqs), runs_ahead, _ = case
    bench = Bench(tiny_model, Budget(max_num_tokens=tokens, max_num_seqs=seqs), runs_ahead=runs_ahead)
    yield bench
    bench.close()


@ALL
def test_identical_to_generate_in_a_mixed_batch_and_from_the_prefix_cache(bench: Bench, tiny_model: Path) -> None:
    reference = reference_of(tiny_model)
    expected = [reference.generate(text, images, max_tokens=12) for text, images in QUESTIONS]
    for number, (text, pictures) in enumerate(QUESTIONS):
        bench.engine.submit(bench.sequence(f"{number}", text, pictures))
    time.sleep(0.05)
    for image in (noise(1), noise(2, (60, 140)), noise(3, (90, 90)), noise(4, (200, 70))):
        bench.encode([image])  # features come while text before the images may be running already
        time.sleep(0.05)
    answers = bench.collect(len(QUESTIONS))
    assert [answers[f"{number}", 0] for number in range(len(QUESTIONS))] == expected
    bench.check_idle()
    if not bench.pool.state_blocks:
        bench.features.clear()  # the prefix cache must do without
    bench.engine.submit(bench.sequence("again", *QUESTIONS[2]))
    assert bench.collect(1)["again", 0] == expected[2]
    bench.check_idle()


@SOME
def test_choices_fork_from_one_prompt(bench: Bench, tiny_model: Path) -> None:
    expected = reference_of(tiny_model).generate("Say apple", max_tokens=12)
    bench.engine.submit(bench.sequence("r", "Say apple", [], n=3))
    assert bench.collect(3) == {("r", i): expected for i in range(3)}
    bench.check_idle()


@SOME
def test_a_failing_step_fails_its_requests_and_nothing_else(bench: Bench, tiny_model: Path) -> None:
    bench.features[f"{hash(noise(6).tobytes()):x}"] = torch.zeros(3, 5)  # not what the prompt counts on
    bench.engine.submit(bench.sequence("broken", "What is this?", [noise(6)]))
    event = bench.events.get(timeout=300)
    assert isinstance(event, FailureEvent)
    assert event.request_id == "broken"
    bench.check_idle()
    bench.engine.submit(bench.sequence("fine", "Say apple", []))
    assert bench.collect(1)["fine", 0] == reference_of(tiny_model).generate("Say apple", max_tokens=12)


def outcomes(bench: Bench, num_ended: int) -> tuple[dict[str, ServeError], dict[str, list[int]]]:
    """Failures and tokens by request, until one has failed and so many have ended."""
    failures: dict[str, ServeError] = {}
    answers: dict[str, list[int]] = defaultdict(list)
    while num_ended or not failures:
        match bench.events.get(timeout=300):
            case FailureEvent(request_id, error):
                assert request_id not in failures
                failures[request_id] = error
            case TokenEvent() as event:
                answers[event.sequence.request_id].append(event.token.token_id)
                num_ended -= event.finish_reason is not None
    return failures, answers


@SOME
def test_a_request_that_forbids_every_token_fails_alone_by_its_own_fault(bench: Bench, tiny_model: Path) -> None:
    """At its first token, or behind the last that it allows."""
    expected = reference_of(tiny_model).generate("Pear", max_tokens=12)
    for bad_word, allowed in (((3,), {}), ((3, 3), {"broken": [3]})):
        fields: dict[str, Any] = {"allowed_token_ids": (3,), "bad_word_ids": (bad_word,)}
        bench.engine.submit(bench.sequence("fine", "Pear", []))
        bench.engine.submit(bench.sequence("broken", "Say apple", [], **fields))
        failures, answers = outcomes(bench, 1)
        [(request_id, error)] = failures.items()
        assert isinstance(error, InvalidRequest) and (request_id, error.code) == ("broken", "contradiction")
        assert answers == {"fine": expected, **allowed}
        bench.check_idle()


@SOME
def test_logits_without_numbers_end_their_request_and_none_beside_it(bench: Bench, tiny_model: Path) -> None:
    """Nor does anybody find its KV: the same prompt with a right feature gets the right answer."""
    reference, picture = reference_of(tiny_model), noise(6)
    bench.encode([picture])
    right = dict(bench.features)
    bench.features |= {name: torch.full_like(feature, torch.nan) for name, feature in right.items()}
    for name, text, images in (
        ("one", "Say apple", []),
        ("broken", "What is this?", [picture]),
        ("two", "Pear", []),
    ):
        bench.engine.submit(bench.sequence(name, text, images))
    failures, answers = outcomes(bench, 2)
    [(request_id, error)] = failures.items()
    assert request_id == "broken" and "the logits of this request are NaN" in str(error)
    assert answers == {
        name: reference.generate(text, max_tokens=12) for name, text in (("one", "Say apple"), ("two", "Pear"))
    }
    bench.check_idle()
    bench.features |= right
    bench.engine.submit(bench.sequence("again", "What is this?", [picture]))
    assert bench.collect(1)["again", 0] == reference.generate("What is this?", [picture], max_tokens=12)


@ONE
def test_a_cached_prefix_that_waits_for_a_feature_holds_nobody_up(tiny_model: Path) -> None:
    bench = Bench(tiny_model, Budget(max_num_tokens=16, max_num_seqs=8))
    images = [noise(1), noise(2, (60, 140))]
    bench.encode(images)
    bench.engine.submit(bench.sequence("first", "What is this?", images))
    bench.collect(1)
    bench.check_idle()
    bench.features.clear()
    sequence = bench.sequence("waits", "What is this?", images)
    num_cached = sequence.spans[1].start // BLOCK_SIZE + 1  # ends within the second image
    assert 16 <= num_cached * BLOCK_SIZE < sequence.spans[1].end
    sequence.block_hashes = sequence.block_hashes[:num_cached]
    with bench.engine.changed:
        bench.engine.submit(sequence)
        bench.engine.submit(bench.sequence("behind", "Say apple", []))
    assert ("behind", 0) in bench.collect(1)
    bench.engine.abort("waits")
    bench.check_idle()
    bench.close()


@ONE
def test_the_end_of_the_thread_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would compute any more, and a process that answers its probes is not started again."""
    ended = threading.Event()
    monkeypatch.setattr(pace, "end_process", ended.set)

    def fail(now: float) -> ScheduleOutput:
        raise AssertionError("a plan that cannot be")

    monkeypatch.setattr(bench.engine.queues, "plan", fail)
    bench.engine.wake()
    assert ended.wait(300)
    bench.loop._thread.join()


@ONE
def test_a_step_that_cannot_be_accounted_for_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(output: ScheduleOutput, seconds: float) -> None:
        raise OSError("no space left for figures")

    monkeypatch.setattr(bench, "add_step", fail)
    bench.engine.submit(bench.sequence("fine", "Say apple", []))
    assert len(bench.collect(1)["fine", 0]) == 12


@ONE
def test_an_answer_that_was_given_up_is_no_short_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = StageRates(time.monotonic)
    monkeypatch.setattr(bench, "add_step", rates.stepped)
    bench.engine.submit(bench.sequence("given up", "Say apple", [], max_tokens=500))
    for _ in range(3):
        bench.events.get(timeout=60)
    bench.engine.abort("given up")
    bench.check_idle()
    for name in ("one", "two"):
        bench.engine.submit(bench.sequence(name, "Say apple", []))
        bench.collect(1)
    assert rates.mean_output_tokens == 12
