"""Bodies of requests: JSON, options without effect, and forms."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import decode_object
from epd_serve.protocol.openai.generation import ChatCompletionRequest
from epd_serve.protocol.openai.responses import ResponsesCall
from epd_serve.protocol.openai.transcriptions import TranscriptionCall, read_form

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"a":', b"\xff{}", b'{"a": 1} x', b'{"a":' * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300],
    ids=lambda body: f"{len(body)} {body[:9]!r}",
)
def test_text_that_is_no_json_object_is_refused(body):
    with pytest.raises(InvalidRequest) as refused:
        decode_object(bytearray(body))
    assert refused.value.code == "invalid_json"


def test_many_lists_are_not_deep():
    body = {"a": [[] for _ in range(1000)], "b": json.loads("[" * 150 + "]" * 150)}
    assert decode_object(json.dumps(body).encode()) == body


def test_a_byte_order_mark_is_skipped():
    assert decode_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    ("field", "accepted", "refused"),
    [
        ("store", False, True),
        ("functions", [], [{"name": "f"}]),
        ("modalities", ["text"], ["text", "audio"]),
        ("best_of", 1, 2),
        ("suffix", "", "x"),
        ("service_tier", "auto", "flex"),
    ],
)
def test_an_option_without_effect_may_ask_for_the_default(field, accepted, refused):
    for value in (accepted, None):
        ChatCompletionRequest.parse(json.dumps({**CHAT, field: value}).encode())
    with pytest.raises(InvalidRequest) as told:
        ChatCompletionRequest.parse(json.dumps({**CHAT, field: refused}).encode())
    assert (told.value.code, told.value.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize("name", ["json", "regex", "choice"])
def test_vllms_old_guided_fields_name_the_new_one(name):
    with pytest.raises(InvalidRequest, match=f"structured_outputs.{name} instead") as told:
        ChatCompletionRequest.parse(json.dumps({**CHAT, f"guided_{name}": ["a"]}).encode())
    assert told.value.param == f"guided_{name}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**29}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"temprature": 1}, "temprature"),
        ({"max-tokens": 1}, "max-tokens"),
        ({"list": []}, "list"),
        ({"messages": []}, "messages"),
        ({"priority": 0.5}, "priority"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning_content"),
    ],
)
def test_a_wrong_field_is_named(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        ChatCompletionRequest.parse(json.dumps(CHAT | fields).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_part_of_a_response_is_named_by_its_place_in_the_input():
    turns = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
    ]
    call = ResponsesCall.parse(json.dumps({"instructions": "Be brief.", "input": turns}).encode())
    assert [source.param for source in call.media()] == ["input[2].output[0].image_url"]


def form(fields):
    part = b'--xyz\r\nContent-Disposition: form-data; name="%b"; filename="a"\r\n\r\n%b\r\n'
    return b"".join(part % (name.encode(), content) for name, content in fields.items()) + b"--xyz--\r\n"


@given(st.dictionaries(st.sampled_from(["file", "model", "prompt"]), st.binary(max_size=99)))
def test_a_form_round_trips(fields):
    if fields and not any(b"--xyz" in content for content in fields.values()):
        assert read_form(bytearray(form(fields))) == fields


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"--b--", b"--xyz", form({"file": b"x"})[:-9], b"--xyz\r\nNothing: here\r\n\r\nx\r\n--xyz--\r\n"],
)
def test_a_broken_form_is_refused(body):
    with pytest.raises(InvalidRequest) as refused:
        TranscriptionCall.parse(bytearray(body))
    assert refused.value.code == "invalid_form"


def test_numbers_and_truth_values_of_a_form_are_text():
    fields = {"file": b"RIFF\xff", "temperature": b"0.5", "stream": b"true", "response_format": b"text"}
    call = TranscriptionCall.parse(form(fields))
    assert (call.temperature, call.stream, call.asked.file) == (0.5, True, b"RIFF\xff")
    assert call.translation().content_type.startswith(b"text/plain")
