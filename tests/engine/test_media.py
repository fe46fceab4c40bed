"""Sounds, videos and pictures in chunks of any size, behind prefixes, in a pool that is too small: the tokens of
``generate``, for the families that other tests of an engine leave out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from engine_bench import BLOCK_SIZE, EngineBench, Medium
from identity import OMNI_QUESTIONS, QUESTIONS, SOUND_QUESTIONS, VIDEO_QUESTIONS, Question
from reference import Reference

from epd_serve.sched.schedule import Budget

MAX_TOKENS = 40
_SLOW = (
    "qwen2_audio",
    "qwen2_5_omni",
    "qwen3_omni",
    "qwen3_5_moe",
    "glm4v_moe",
    "gemma4",
)


@pytest.fixture(
    scope="module",
    params=[
        *("qwen3_asr", "qwen3_5"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in _SLOW),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp("media") / request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Question, list[int]]:
    """Questions that the model takes, and their answers."""
    reference, template = Reference(model), (model / "chat_template.jinja").read_text()
    asked = [QUESTIONS[1], *(SOUND_QUESTIONS if reference.takes_sounds else ())]
    if reference.takes_images:
        asked += QUESTIONS[2:4]
    if "'video'" in template:
        asked += [one for one in VIDEO_QUESTIONS if not any(clip.fps for clip in one.videos)]
    if reference.takes_sounds and reference.takes_images:
        asked += OMNI_QUESTIONS
    asked = [one for one in asked if reference.takes(one.videos, one.sounds)]
    return {
        one: reference.generate(one.text, one.images, one.videos, one.sounds, max_tokens=MAX_TOKENS)
        for one in asked
    }


def media_of(question: Question) -> list[Medium]:
    return [*question.images, *question.videos, *question.sounds]


@pytest.fixture
def bench(model: Path, request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    """Of a budget of so many tokens a step."""
    budget = Budget(max_num_tokens=getattr(request, "param", 64), max_num_seqs=8)
    bench = EngineBench(model, budget, num_blocks=800)
    yield bench
    bench.close()


@pytest.mark.parametrize(
    "bench", [7, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4096))], indirect=True
)
def test_chunks_of_any_size(bench: EngineBench, expected: dict[Question, list[int]]) -> None:
    for question in expected:
        bench.encode(media_of(question))
    for number, question in enumerate(expected):
        sequence = bench.sequence(str(number), question.text, media_of(question), max_tokens=MAX_TOKENS)
        bench.engine.submit(sequence)
    answers = bench.collect(len(expected))
    assert [answers[str(number), 0] for number in range(len(expected))] == list(expected.values())
    bench.check_idle()


def test_a_prefix_may_end_within_any_item(bench: EngineBench, expected: dict[Question, list[int]]) -> None:
    num_tried = 0
    for number, (question, answer) in enumerate(expected.items()):
        for attempt in range(4):
            name = f"{number}-{attempt}"
            sequence = bench.sequence(name, question.text, media_of(question), max_tokens=MAX_TOKENS)
            spans = [span for span in sequence.spans if span.length > 2 * BLOCK_SIZE]
            if attempt and (not spans or bench.pool.state_blocks):
                break
            if attempt:
                span = spans[attempt % len(spans)]
                kept = (span.start + max(span.length * attempt // 4, BLOCK_SIZE)) // BLOCK_SIZE
                bench.pool.release(bench.pool.allocate(bench.pool.num_free - kept))
                assert len(bench.pool.match(sequence.block_hashes)) == kept
                assert span.start < kept * BLOCK_SIZE < span.start + span.length
                num_tried += 1
            bench.encode(media_of(question))
            bench.engine.submit(sequence)
            assert bench.collect(1)[name, 0] == answer
            bench.check_idle()
    if not num_tried:
        pytest.skip("prefixes are not cached, or its items are shorter than two blocks")
