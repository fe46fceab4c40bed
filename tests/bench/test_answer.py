"""Streams of events: whatever the pieces they come in, the figures are those of the whole."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.bench.client import Answer
from epd_serve.bench.types import Failure


def chunk(content: str | None = None, finish: str | None = None, index: int = 0, **delta: Any) -> bytes:
    if content is not None:
        delta["content"] = content
    return json.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}).encode()


USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'
)
EVENTS = (chunk("", role="assistant"), chunk("Ü"), chunk(""), chunk("b"), chunk(finish="stop"), USAGE, b"[DONE]")


def stream(*events: bytes, end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + event + end for event in events)


def read(data: bytes, *, complete: bool = True) -> Answer:
    answer = Answer()
    answer.feed(data, 1.0)
    answer.end(complete=complete)
    return answer


def test_times_are_exact() -> None:
    answer = Answer()
    for second, event in enumerate(EVENTS):
        answer.feed(stream(event), float(second))
    answer.end(complete=True)
    assert answer.failure is None
    assert answer.first_chunk_s == 0.0
    assert answer.token_times_s == [1.0, 2.0, 3.0]  # the empty one behind the first is a token, the role is none
    assert answer.last_event_s == 4.0
    assert "".join(answer.text) == "Üb"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 5, 4)
    assert answer.finish_reason == "stop"


@given(st.lists(st.integers(0, 2000), max_size=20), st.sampled_from([b"\n\n", b"\r\n\r\n"]), st.booleans())
def test_any_pieces_give_the_same(cuts: list[int], end: bytes, comments: bool) -> None:
    data = stream(*EVENTS, end=end)
    if comments:
        data = b": keep-alive" + end + data
    whole = read(data)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = Answer()
    for at, until in pairwise(edges):
        pieces.feed(data[at:until], 1.0)
    pieces.end(complete=True)
    for name in ("text", "failure", "finish_reason", "prompt_tokens", "completion_tokens"):
        assert getattr(pieces, name) == getattr(whole, name)
    assert pieces.failure is None
    assert len(pieces.token_times_s) == 3


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    read(data)
    read(stream(data))


@pytest.mark.parametrize(
    ("data", "complete", "failure"),
    [
        (stream(chunk("a"), chunk(finish="stop"), b"[DONE]"), False, None),  # all was there before the reset
        (stream(chunk("a"), chunk(finish="stop")), False, Failure.CUT_STREAM),
        (stream(chunk("a"), chunk(finish="stop")), True, None),  # some servers send no [DONE]
        (stream(chunk("a"), b"[DONE]"), True, Failure.NO_FINISH_REASON),
        (stream(chunk("a")), True, Failure.CUT_STREAM),
        (stream(chunk("a"), chunk("b", index=1), chunk(finish="stop"), b"[DONE]"), True, Failure.NO_FINISH_REASON),
        (stream(chunk("", role="assistant"), chunk(finish="stop"), b"[DONE]"), True, Failure.NO_TOKENS),
        (stream(b'{"choices": ['), True, Failure.MALFORMED),
        (stream(b"[1]"), True, Failure.MALFORMED),
        (stream(b'{"message": "\xff"}'), True, Failure.MALFORMED),
        (b"", True, Failure.MALFORMED),
        (b"<html>", True, Failure.MALFORMED),
        (stream(chunk("a"), b'{"error": null, "choices": []}', chunk(finish="stop")), True, None),
        (stream(chunk("a"), b'{"error": "gone"}', chunk(finish="stop")), True, Failure.IN_STREAM_ERROR),
        (stream(chunk("a"), b'{"object": "error", "message": "x"}'), True, Failure.IN_STREAM_ERROR),
        (b"event: error\ndata: {}\n\n", True, Failure.IN_STREAM_ERROR),
    ],
)
def test_failures_by_name(data: bytes, complete: bool, failure: Failure | None) -> None:
    assert read(data, complete=complete).failure == failure
