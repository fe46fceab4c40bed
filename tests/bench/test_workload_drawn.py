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
from tokenizers import Tokenizer

from epd_serve.bench.types import Item, Media
from epd_serve.bench.workloads import load_workload
from epd_serve.bench.workloads.lengths import parse_lengths, parse_seconds, parse_sizes
from epd_serve.bench.workloads.synthetic import synthesise, text_of
from epd_serve.demo import weights_dir
from epd_serve.media.audio import AudioLimits, read_audio_facts
from epd_serve.media.video import VideoLimits, read_facts
from epd_serve.types import AudioFacts, VideoFacts


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


def test_the_papers_mixed_workload_has_as_many_texts_as_images_also_in_short_runs() -> None:
    items = take("visualwebinstruct-like,image_size=32x32", 1000)
    assert Counter(item.modality for item in items) == {"image": 256, "text": 256}
    assert Counter(item.modality for item in items[:32]) == {"image": 16, "text": 16}
    assert fmean(map(num_words, items)) == pytest.approx(63.1, rel=0.05)
    assert set(sizes(pictures(take("visualwebinstruct-like", 4)))) == {(1280, 720)}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    spec = "synthetic,image_size=200x100,turns=1..3,image_reuse=0.3"
    assert take(spec, 60) == take(spec, 60)
    assert take(spec, 60) != take(spec, 60, seed=2)
    longer = take(spec, 80)
    assert longer[:60] == take(spec, 60), "how many are asked for changes none of them"


def test_pictures_cost_what_photographs_do() -> None:
    """A JPEG of a plain picture has about 0.1 bits a pixel, one of a photograph 1 to 3."""
    rng = Random(5)
    for width, height in ((802, 652), (640, 480), (28, 28), (1, 9)):
        picture = synthesise((width, height), rng)
        image = Image.open(io.BytesIO(picture.data))
        assert (image.format, image.size, image.mode) == ("JPEG", (width, height), "RGB")
        if width > 100:
            assert 1.0 < 8 * len(picture.data) / (width * height) < 3.0
            counts = Counter(picture.data)
            assert len(counts) == 256
            assert max(counts.values()) < 0.05 * len(picture.data), "coded data looks random"


def test_words_are_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))
    text = text_of(500, Random(1))
    assert len(tokenizer.encode(text).ids) == pytest.approx(500, abs=2)


def test_images_are_shown_again_as_often_as_asked_for() -> None:
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


def test_text_requests_are_as_long_as_they_were_asked_for() -> None:
    items = take("synthetic,image_share=0,text_tokens=7,system_tokens=3,ignore_eos=false,requests=5", 50)
    texts = [[part for message in item.messages for part in message.parts] for item in items]
    assert [[len(str(text).split()) for text in parts] for parts in texts] == [[3, 7]] * 5
    assert not any(item.fields for item in items)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("sharegpt4o", "known: sharegpt4o-like, visual"),
        ("nothing", "known: sharegpt4o-like, visualwebinstruct-like, synthetic, videos, audio, custom, trace"),
        ("synthetic:file.jsonl", "reads no file"),
        ("trace", "needs a file; write trace:FILE.jsonl"),
        ("custom:", "names no file"),
        ("synthetic,image_siz=3x3", "known: text_tokens, output_tokens"),
        ("synthetic,image_size=3", "image_size: '3': no image size of 1 to 8192 pixels"),
        ("synthetic,image_size=0x10", "no image size of 1 to 8192 pixels"),
        ("synthetic,text_tokens=9..3", "text_tokens: '9..3': the lower end comes first"),
        ("synthetic,text_tokens=normal:5", "write a number, LOW..HIGH"),
        ("synthetic,image_reuse=1.5", "a number from 0 to 1"),
        ("synthetic,turns=1,turns=2", "turns is given twice"),
        ("synthetic,requests=none", "whole number from 1 on"),
        ("synthetic,ignore_eos=maybe", "write true or false"),
    ],
)
def test_what_cannot_be_is_explained(spec: str, says: str) -> None:
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
def test_draws_stay_in_what_was_written(low: int, more: int, weight: float, seed: int) -> None:
    rng = Random(seed)
    assert parse_lengths(str(low))(rng) == low
    assert low <= parse_lengths(f"{low}..{low + more}")(rng) <= low + more
    mixed = parse_lengths(f"{low}@{weight:f}+{low + more}")
    assert mixed(rng) in (low, low + more)
    assert parse_lengths(f"normal:{low}:0")(rng) == low
    assert parse_lengths(f"lognormal:{low}:0")(rng) == low


def test_clips_have_their_length_and_take_the_place_of_images() -> None:
    spec = "videos,image_share=0.25,video_size=63x48,video_s=2,video_fps=5"
    items = take(spec, 32)
    assert Counter(item.modality for item in items) == {"text": 24, "video": 8}
    clips = pictures(items)
    limits = VideoLimits(max_pixels=1 << 20, max_bytes=1 << 20, max_frames=100, max_seconds=10)
    assert {read_facts(clip.data, limits) for clip in clips} == {VideoFacts(64, 48, 10, 5.0)}
    assert len({clip.data for clip in clips}) == len(clips) == 8
    assert pictures(take(spec, 32)) == clips, "the same seed gives the same bytes"


def test_sounds_have_their_length() -> None:
    sounds = pictures(take("audio,audio_s=2", 12))
    limits = AudioLimits(max_bytes=1 << 20, max_seconds=10)
    assert {read_audio_facts(one.data, limits) for one in sounds} == {AudioFacts(32_000, 16_000, 1)}
    assert len({one.data for one in sounds}) == len(sounds) == 12
    assert pictures(take("audio,audio_s=2", 12)) == sounds, "the same seed gives the same bytes"
