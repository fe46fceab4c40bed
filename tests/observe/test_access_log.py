"""The access log survives rotation of its file; trace contexts by themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.protocol.wire import read_prompt_note, write_prompt_note
from epd_serve.telemetry.span import join_trace, parse_traceparent
from proxy.observe.access_log import AccessLog
from proxy.observe.record import ENCODE, ENCODED, STORED, RequestRecord


def record(name: str) -> RequestRecord:
    made = RequestRecord("chat", join_trace(), name, time.monotonic())
    made.status, made.end_s = 200, time.monotonic()
    made.complete()
    return made


def names(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_bytes().splitlines()] if path.exists() else []


def test_a_file_that_is_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path, moved = tmp_path / "access.jsonl", tmp_path / "access.jsonl.1"
    log = AccessLog(path)
    log.put(record("one"))
    while not names(path):
        time.sleep(0.01)
    path.rename(moved)
    log.put(record("two"))
    log.close()
    assert names(moved) == ["one"] and names(path) == ["two"]


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-of-the-future", True),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_traceparent_as_the_specification_has_it(header: str, sampled: bool | None) -> None:
    found = parse_traceparent(header, "vendor=1")
    assert (None if found is None else found.sampled) is sampled
    joined = join_trace(header, "vendor=1")
    if found is None:
        assert joined.trace_id != TRACE and (joined.parent_id, joined.state) == ("", "")
    else:
        assert (joined.trace_id, joined.parent_id, joined.state) == (TRACE, SPAN, "vendor=1")
        assert joined.span_id != SPAN
        assert parse_traceparent(joined.traceparent) is not None


@given(st.integers(0, 1 << 40), st.sets(st.integers(0, 99)))
def test_a_prompt_note_round_trips(num_tokens: int, had: set[int]) -> None:
    assert read_prompt_note(write_prompt_note(num_tokens, sorted(had), 3)) == (num_tokens, had, 3)


def test_events_of_a_stream_tell_its_end() -> None:
    made = RequestRecord("chat", join_trace(), "r", time.monotonic())
    made.forwarded(b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n')
    made.forwarded(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')
    made.forwarded(b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\ndata: [DONE]\n\n')
    made.end_answer(None)
    made.status, made.end_s = 200, time.monotonic()
    made.complete()
    assert (made.finish_reason, made.prompt_tokens, made.output_tokens) == ("stop", 7, 2)


def test_an_item_whose_encoder_was_overtaken_by_the_answer_is_counted() -> None:
    """P hears of a feature by an event; the encoder's own answer may come when all is over."""
    made = RequestRecord("chat", join_trace(), "r", time.monotonic())
    heard, overtaken, failed = (made.begin(ENCODE, "r-1", "e0", item) for item in ("a", "b", "c"))
    heard.end(feature=STORED)
    failed.end(failed=True)
    made.status, made.end_s = 200, time.monotonic()
    made.complete()
    assert [span.attributes.get("feature") for span in (heard, overtaken, failed)] == [STORED, ENCODED, None]
    left = RequestRecord("chat", join_trace(), "r", time.monotonic())
    span = left.begin(ENCODE, "r-1", "e0", "a")
    left.status, left.end_s = 499, time.monotonic()
    left.complete()
    assert span.attributes == {"instance": "e0", "item": "a", "failed": True}
