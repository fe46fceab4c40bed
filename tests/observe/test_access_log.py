"""The access log survives rotation of its file; trace contexts by themselves."""

import json
import time

import pytest

from epd_serve.telemetry.span import join_trace, parse_traceparent
from proxy.observe.access_log import AccessLog
from proxy.observe.record import ENCODE, ENCODED, STORED, RequestRecord


def record(name):
    made = RequestRecord("chat", join_trace(), name, time.monotonic())
    made.status, made.end_s = 200, time.monotonic()
    made.complete()
    return made


def names(path):
    return [json.loads(line)["request_id"] for line in path.read_bytes().splitlines()] if path.exists() else []


def test_a_file_that_is_moved_away_is_opened_anew(tmp_path):
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
def test_traceparent_as_the_specification_has_it(header, sampled):
    found = parse_traceparent(header, "vendor=1")
    assert (None if found is None else found.sampled) is sampled
    joined = join_trace(header, "vendor=1")
    if found is None:
        assert joined.trace_id != TRACE and (joined.parent_id, joined.state) == ("", "")
    else:
        assert (joined.trace_id, joined.parent_id, joined.state) == (TRACE, SPAN, "vendor=1")
        assert joined.span_id != SPAN
        assert parse_traceparent(joined.traceparent) is not None


def test_an_item_whose_encoder_was_overtaken_by_the_answer_is_counted():
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


def test_a_note_of_an_instance_of_another_version_is_ignored():
    made = RequestRecord("chat", join_trace(), "r", time.monotonic())
    made.status, made.end_s, made.prompt_note = 200, time.monotonic(), "35;0,2;16"
    made.complete()
    assert made.prompt_tokens is None
