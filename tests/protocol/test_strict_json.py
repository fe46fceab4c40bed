"""Strict JSON agrees with the standard library on what a text means, and refuses depth and repeated keys."""

import gzip
import json
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epd_serve.protocol.openai import strict_json
from epd_serve.protocol.openai.strict_json import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    JSONRefused,
    JSONTooLarge,
    check_size,
    decode,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ['":', '\\":', ":", '"data:x', "[{", "\\"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)
LAYOUTS = st.sampled_from([{}, {"indent": 1}, {"separators": (" ,", " : ")}, {"ensure_ascii": False}])


@given(VALUES, LAYOUTS, st.booleans())
@example({'a":': 1, '":': [":", '"']}, {}, False)
@example({"a\\": 1, "b": ':"'}, {"separators": (",", "\n:")}, False)
def test_what_is_valid_means_what_it_means_elsewhere(value, layout, long):
    value = {"value": value, "url": "data:image/png;base64," + "A" * 9000} if long else value
    assert decode(json.dumps(value, **layout).encode()) == value


@given(VALUES, TEXT, LAYOUTS, st.booleans())
def test_a_repeated_key_is_found_wherever_it_is(value, key, layout, long):
    def text(name):
        return json.dumps(name, **layout)

    one = json.dumps(value, **layout)
    filler = json.dumps("data:image/png;base64," + "A" * 9000) if long else "0"
    twice = f'[{one}, {{"x {key!r}": {filler}}}, {{{text(key)} : {one}, {text(key)}:{filler}}}]'
    try:
        json.loads(twice)
    except json.JSONDecodeError:
        return  # the filler key was no JSON
    with pytest.raises(JSONRefused, match="occurs twice"):
        decode(twice.encode())


def test_spelling_a_key_in_another_way_hides_nothing():
    with pytest.raises(JSONRefused, match="the key 'model' occurs twice"):
        decode(rb'{"model": "a", "mode\u006c": "b"}')
    with pytest.raises(JSONRefused, match="the key 'a' occurs twice"):
        decode(rb'{"a": 1, "a": 2, "b": "\u003a"}')


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"b":'])
def test_depth_has_an_end_long_before_the_interpreter_has(opening):
    per = opening.count(b"[") + opening.count(b"{")
    for times, is_refused in (
        (MAX_DEPTH // per, False),
        (MAX_DEPTH // per + 1, True),
        (MAX_CONTAINERS // per, True),
    ):
        text = (
            opening * times
            + b"0"
            + b"".join({91: b"]", 123: b"}"}[c] for c in opening[::-1] if c in b"[{") * times
        )
        if is_refused:
            with pytest.raises(JSONRefused, match="nested more than 64 deep"):
                decode(text)
        else:
            decode(text)
    wide = b"[" + b",".join([b'{"a": [1, "]"]}'] * 5000) + b"]"
    assert len(decode(wide)) == 5000


@given(VALUES, LAYOUTS, st.integers(1, 30))
def test_values_are_counted_wherever_a_piece_ends(value, layout, piece):
    """By the same rule as a reader of JSON that knows strings: brackets, and commas between values."""
    text = json.dumps([value, '[{,\\"'], **layout).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)
    num_brackets = outside.count(b"[") + outside.count(b"{")
    num_values = num_brackets + outside.count(b",") + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_PIECE", piece)
        patch.setattr(strict_json, "MAX_CONTAINERS", num_brackets)
        patch.setattr(strict_json, "MAX_VALUES", num_values)
        check_size(text)
        patch.setattr(strict_json, "MAX_CONTAINERS", num_brackets - 1)
        with pytest.raises(JSONTooLarge, match="lists and objects"):
            check_size(text)
        patch.setattr(strict_json, "MAX_CONTAINERS", num_brackets)
        patch.setattr(strict_json, "MAX_VALUES", num_values - 1)
        with pytest.raises(JSONTooLarge, match="values"):
            check_size(text)


@pytest.mark.parametrize(
    "text",
    [
        b'"' + b'\\"' * 1_000_000 + b"\\",
        b"[" * 501 + b'"' + b'\\"' * 1_000_000 + b"\\",
        b'{"a":[],' * 500_000,
        b'["data:' * 500_000,
        b'"data:\\' * 500_000,
        b"{" * 3_000_000,
    ],
    ids=["escapes", "brackets and escapes", "wide", "data", "data and escapes", "deep"],
)
def test_hostile_texts_cost_no_more_than_their_length(text):
    started = time.process_time()
    with pytest.raises(JSONRefused):
        decode(text)
    assert time.process_time() - started < 2


def test_a_byte_order_mark_is_ignored_and_no_second_one():
    assert decode(b"\xef\xbb\xbf" + b'{"a": 1}') == decode(bytearray(b"\xef\xbb\xbf" + b'{"a": 1}')) == {"a": 1}
    with pytest.raises(JSONRefused, match="malformed"):
        decode(b"\xef\xbb\xbf" * 100_000 + b"{}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (gzip.compress(b"{}", mtime=0), "compressed with gzip"),
        ("{}".encode("utf-16"), "UTF-16"),
        ("{}".encode("utf-16-be"), "UTF-16"),
        ("{}".encode("utf-32"), "UTF-16 or UTF-32"),
    ],
)
def test_what_is_there_in_place_of_json_is_said(text, words):
    with pytest.raises(JSONRefused, match=words):
        decode(text)
