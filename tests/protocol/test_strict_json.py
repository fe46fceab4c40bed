"""JSON of the gateway agrees with the standard library on what a text means, and has bounds."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.protocol.openai import strict_json
from epd_serve.protocol.openai.strict_json import MAX_DEPTH, JSONTooLarge, check_size, decode_object

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(['":', '\\":', ":", "[{", "\\"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)
LAYOUTS = st.sampled_from([{}, {"indent": 1}, {"separators": (" ,", " : ")}, {"ensure_ascii": False}])


@given(VALUES, LAYOUTS, st.booleans())
def test_a_valid_text_means_what_it_means_elsewhere(value, layout, marked):
    text = json.dumps({"value": value}, **layout).encode()
    assert decode_object(b"\xef\xbb\xbf" * marked + text) == {"value": value}


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"b":'])
@pytest.mark.parametrize("times", [MAX_DEPTH, 10_000])
def test_depth_has_an_end_long_before_the_interpreter_has(opening, times):
    closing = b"".join({91: b"]", 123: b"}"}[c] for c in opening[::-1] if c in b"[{")
    with pytest.raises(InvalidRequest) as refused:
        decode_object(b'{"value":' + opening * times + b"0" + closing * times + b"}")
    assert refused.value.code in ("invalid_json", "request_too_large")
    times = (MAX_DEPTH - 1) // len(closing)
    decode_object(b'{"value":' + opening * times + b"0" + closing * times + b"}")


@given(VALUES, LAYOUTS)
def test_values_outside_of_strings_are_counted(value, layout):
    text = json.dumps([value, '[{,\\"'], **layout).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)
    num_containers = outside.count(b"[") + outside.count(b"{")
    num_values = num_containers + outside.count(b",") + 1
    with pytest.MonkeyPatch.context() as patch:
        for containers, values in ((0, 0), (0, 1), (1, 0)):
            patch.setattr(strict_json, "MAX_CONTAINERS", num_containers - containers)
            patch.setattr(strict_json, "MAX_VALUES", num_values - values)
            if containers or values:
                with pytest.raises(JSONTooLarge):
                    check_size(text)
            else:
                check_size(text)


@pytest.mark.parametrize(
    "text",
    [b'"' + b'\\"' * 1_000_000 + b"\\", b'{"a":[],' * 500_000, b'["data:' * 500_000, b"{" * 3_000_000],
    ids=["escapes", "wide", "data", "deep"],
)
def test_hostile_texts_cost_no_more_than_their_length(text):
    started = time.process_time()
    with pytest.raises(InvalidRequest):
        decode_object(text)
    assert time.process_time() - started < 2


def test_too_many_values_are_a_413():
    with pytest.raises(TooLarge):
        decode_object(b"[" + b"1," * strict_json.MAX_VALUES + b"1]")
