"""Frames come out as they went in, however the bytes are cut."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.protocol import frames

FRAMES = st.lists(
    st.tuples(
        st.integers(0, frames.END),
        st.lists(st.integers(0, 2**32 - 1), max_size=4),
        st.binary(max_size=40),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(1, 30), max_size=40))
def test_frames_survive_any_cutting(wanted: list[tuple[int, list[int], bytes]], cuts: list[int]) -> None:
    data = b"".join(frames.pack(*frame) for frame in wanted)
    reader, found = frames.FrameReader(), []
    for cut in (*cuts, len(data) + 1):
        chunk, data = data[:cut], data[cut:]
        for choice, ids, events in reader.feed(chunk):
            found.append((choice, array("I", bytes(ids)).tolist(), bytes(events)))
    assert found == wanted
    assert reader.is_between_frames


@given(FRAMES)
def test_events_are_what_was_packed(wanted: list[tuple[int, list[int], bytes]]) -> None:
    assert frames.events_of(frames.pack(*frame) for frame in wanted) == b"".join(events for *_, events in wanted)


@pytest.mark.parametrize("head", [(0, 0, 0), (7, 0, 1), (1 << 30, 0, 0)])
def test_what_is_no_frame_is_refused(head: tuple[int, int, int]) -> None:
    with pytest.raises(frames.FrameError):
        list(frames.FrameReader().feed(frames.HEAD.pack(*head) + bytes(20)))


def test_a_piece_of_a_frame_is_kept_back() -> None:
    reader = frames.FrameReader()
    assert list(reader.feed(frames.pack(0, (5,), b"data: {}\n\n")[:-1])) == []
    assert not reader.is_between_frames
