"""Frames come out as they went in, however the bytes are cut."""

from __future__ import annotations

import pytest
from frame_bodies import whole_frames
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.protocol import frames
from epd_serve.protocol.openai import chunks

EVENTS = st.binary(max_size=40).map(lambda data: data.replace(b"\x1e", b"\x1f"))
FRAMES = st.lists(
    st.tuples(st.integers(0, 300), st.lists(st.integers(0, 2**32 - 1), max_size=4), EVENTS), max_size=8
)


def packed(wanted: list[tuple[int, list[int], bytes]]) -> bytes:
    return b"".join(frames.pack(*frame) for frame in wanted)


@given(FRAMES, st.lists(st.integers(1, 30), max_size=40), st.booleans())
def test_frames_survive_any_cutting(
    wanted: list[tuple[int, list[int], bytes]], cuts: list[int], ends: bool
) -> None:
    wanted = [*wanted, (frames.END, [7], b"data: [DONE]\n\n")] if ends else wanted
    data, reader, found = packed(wanted), frames.FrameReader(), b""
    for cut in (*cuts, len(data) + 1):
        chunk, data = data[:cut], data[cut:]
        found += reader.read(chunk)
    assert found == b"".join(events for *_, events in wanted)
    tokens = [token for _, tokens, _ in wanted for token in tokens]
    assert frames.token_ids(reader.labels) == tokens
    assert frames.num_tokens(reader.labels) == len(tokens)
    assert not reader._rest
    assert reader.ended == ends and reader.error is None


@given(FRAMES)
def test_frames_are_what_was_packed(wanted: list[tuple[int, list[int], bytes]]) -> None:
    assert whole_frames(packed(wanted)) == wanted


@given(FRAMES, FRAMES)
def test_nothing_is_read_behind_an_error(
    before: list[tuple[int, list[int], bytes]], behind: list[tuple[int, list[int], bytes]]
) -> None:
    reader = frames.FrameReader()
    found = reader.read(packed([*before, (frames.ERROR, [], b"what went wrong"), *behind]))
    assert found == b"".join(events for *_, events in before)
    assert reader.error == b"what went wrong" and not reader.ended
    assert frames.token_ids(reader.labels) == [token for _, tokens, _ in before for token in tokens]


@given(st.text())
def test_no_event_has_the_separator_in_it(text: str) -> None:
    event = chunks.event({"content": text + "\x1e"})
    assert whole_frames(frames.pack(0, (5,), event)) == [(0, [5], event)]


@pytest.mark.parametrize("data", [b"\x1e\x1e", b"a\x1e\x1e", b"0,\x1edata\x1e", b"0;1\x1e\x1e", b"-3\x1e\x1e"])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(frames.FrameError):
        frames.FrameReader().read(data)


def test_an_endless_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_NBYTES", 100)
    reader = frames.FrameReader()
    assert reader.read(b"0,1\x1e" + b"x" * 90) == b""
    with pytest.raises(frames.FrameError):
        reader.read(b"x" * 90)


def test_a_piece_of_a_frame_is_kept_back() -> None:
    reader = frames.FrameReader()
    assert reader.read(frames.pack(0, (5,), b"data: {}\n\n")[:-1]) == b""
    assert reader._rest and not reader.labels
    assert reader.read(b"\x1e") == b"data: {}\n\n"
