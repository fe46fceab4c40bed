"""Requests drawn from distributions: the paper's workloads, conversations, pictures, and what may be written."""

from __future__ import annotations

import io
from collections import Counter
from itertools import islice, pairwise
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from epd_serve.bench.types import Item, Media
from epd_serve.bench.workloads import load_workload
from epd_serve.bench.workloads.notation import parse_lengths, parse_seconds, parse_sizes


def take(spec: str, num_items: int, seed: int = 1) -> list[Item]:
    return list(islice(load_workload(spec).items(seed), num_items))


def pictures(items: list[Item]) -> list[Media]:
    return [
        part for item in items for message in item.messages for part in message.parts if isinstance(part, Media)
    ]


def sizes(media: list[Media]) -> list[tuple[int, int]]:
    return [Image.open(io.BytesIO(one.data)).size for one in media]


def num_words(item: Item) -> int:
    text = item.messages[-1].parts[-1]
    assert isinstance(text, str)
    return len(text.split())


def test_the_papers_image_workload_has_its_means() -> None:
    """Small pictures of the same distribution stand in for the sizes: 512 real ones take five seconds."""
    draw = parse_sizes("lognormal:802x652:0.35")
    drawn = [draw(Random(n)) for n in range(4000)]
    assert fmean(width for width, _ in drawn) == pytest.approx(802, rel=0.02)
    assert fmean(height for _, height in drawn) == pytest.approx(652, rel=0.02)
    items = take("sharegpt4o-like,image_size=32x32", 1000)
    assert len(items) == 512, "as many as in the paper"
    assert {(item.modality, item.max_tokens, item.fields["ignore_eos"]) for item in items} == {("image", 64, True)}
    assert fmean(map(num_words, items)) == pytest.approx(9.6, rel=0.05)
    assert [item.index for item in items] == list(range(512))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    spec = "synthetic,image_size=200x100,turns=1..3,image_reuse=0.3"
    assert take(spec, 60) == take(spec, 60)
    assert take(spec, 60) != take(spec, 60, seed=2)
    longer = take(spec, 80)
    assert longer[:60] == take(spec, 60), "how many are asked for changes none of them"


def test_image_reuse_has_the_requested_share() -> None:
    shown = pictures(take("synthetic,image_share=1,image_size=32x32,images=2,image_reuse=0.4", 300))
    assert len(shown) == 600
    assert 1 - len({one.data for one in shown}) / 600 == pytest.approx(0.4, abs=0.06)
    repeated = [one for one, count in Counter(map(id, shown)).items() if count > 1]
    assert repeated, "a picture that is shown again is the same object: encoded once"
    never = pictures(take("synthetic,image_share=1,image_size=32x32", 100))
    assert len({one.data for one in never}) == 100


def test_conversations_have_their_turns_in_order_and_are_mixed() -> None:
    items = take("synthetic,image_size=32x32,turns=2..4,think_s=1..2,system_tokens=5", 400)
    turns: dict[str | None, list[int]] = {}
    for item in items:
        turns.setdefault(item.conversation, []).append(item.turn)
        assert (item.messages[0].role == "system") == (item.turn == 0)
        assert (item.think_s > 0) == (item.turn > 0)
    assert all(found == list(range(len(found))) for found in turns.values())
    done = list(turns.values())[:-8]
    assert {len(found) for found in done} == {2, 3, 4}
    follows = [a.conversation == b.conversation for a, b in pairwise(items)]
    assert 0.02 < fmean(follows) < 0.5
    systems = {item.messages[0].parts for item in items if item.turn == 0}
    assert len(systems) == 1, "all share the system's message"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("sharegpt4o", "known: sharegpt4o-like, visual"),
        ("nothing", "known: sharegpt4o-like, visualwebinstruct-like, synthetic, videos, audio, custom, trace"),
        ("trace", "needs a file; write trace:FILE.jsonl"),
        ("synthetic,image_siz=3x3", "known: text_tokens, output_tokens"),
        ("synthetic,image_size=3", "image_size: '3': not an image size of 1 to 8192 pixels"),
        ("synthetic,text_tokens=9..3", "text_tokens: '9..3': the lower end comes first"),
        ("synthetic,image_reuse=1.5", "a number from 0 to 1"),
    ],
)
def test_invalid_workloads_are_explained(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(".", r"\.")):
        load_workload(spec)


@given(st.text(alphabet="0123456789.:@+xnormalgeuti- ", max_size=20), st.integers())
def test_any_text_is_a_distribution_or_refused_with_a_reason(text: str, seed: int) -> None:
    for parse in (parse_lengths, parse_seconds):
        try:
            drawn = parse(text)
        except ValueError as error:
            assert str(error)
        else:
            assert drawn(Random(seed)) >= (1 if parse is parse_lengths else 0)
    try:
        sides = parse_sizes(text)(Random(seed))
    except ValueError as error:
        assert str(error)
    else:
        assert all(1 <= side <= 8192 for side in sides)


@given(st.integers(1, 5000), st.integers(0, 5000), st.floats(0.01, 100), st.integers())
def test_draws_stay_within_their_range(low: int, more: int, weight: float, seed: int) -> None:
    rng = Random(seed)
    assert parse_lengths(str(low))(rng) == low
    assert low <= parse_lengths(f"{low}..{low + more}")(rng) <= low + more
    mixed = parse_lengths(f"{low}@{weight:f}+{low + more}")
    assert mixed(rng) in (low, low + more)
    assert parse_lengths(f"normal:{low}:0")(rng) == low
    assert parse_lengths(f"lognormal:{low}:0")(rng) == low
