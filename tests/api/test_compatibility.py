"""Fields and calls of real clients that other servers take; and what a client that errs is told."""

from __future__ import annotations

import io

import pytest
from chat import chat, data_url
from pictures import noise, png

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIELDS = {"temperature": 0, "max_tokens": 4}
CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


async def content(api, body, **fields):
    status, answer = await api.post(CHATS, {**body, **FIELDS, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


async def test_an_image_url_may_be_a_string(api):
    body = chat("What is it?", noise(1))
    expected = await content(api, body)
    body["messages"][0]["content"][0]["image_url"] = data_url(png(noise(1)))
    assert await content(api, body) == expected


async def test_names_and_reasoning_of_the_history_are_for_templates_that_show_them(api):
    plain = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    rich = [{**message, "name": "bob"} for message in plain]
    rich[1] |= {"reasoning_content": "They greet."}
    tokenizer = api.instances["ep0"].language.weights.prompts.tokenizer.inner
    assert await content(api, {"messages": rich}) == await content(api, {"messages": plain})
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.name }}:{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
        )
        _, answer = await api.post("/tokenize", {"messages": rich})
        _, said = await api.post("/detokenize", {"tokens": answer["tokens"]})
        assert said["prompt"] == "bob:Hibob:HoThey greet.bob:?"
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
async def test_health_by_its_head(api, path):
    async with api.session.head(api.url + path) as response:
        assert response.status == 200 and await response.read() == b""


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        (CHATS, {**chat("x"), "temprature": 1}, "temperature"),
        (CHATS, {**chat("x"), "max_completions_tokens": 1}, "max_completion_tokens"),
        (CHATS, {**chat("x"), "response-format": {}}, "response_format"),
        (CHATS, {**chat("x"), "reasoning_efort": "none"}, "reasoning_effort"),
        (CHATS, {**chat("x"), "stream": True, "stream_options": {"include_usages": True}}, "include_usage"),
        (
            CHATS,
            {**chat("x"), "tools": [{"type": "function", "function": {"name": "x", "params": 1}}]},
            "parameters",
        ),
        (
            CHATS,
            {**chat("x"), "response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "schema",
        ),
        (COMPLETIONS, {"prompt": "x", "max_token": 1}, "max_tokens"),
        (COMPLETIONS, {"promt": "x"}, "prompt"),
        (RESPONSES, {"input": "x", "max_output_token": 1}, "max_output_tokens"),
        ("/tokenize", {"promt": "x"}, "prompt"),
    ],
)
async def test_a_misspelt_field_is_told_what_was_meant(api, path, body, meant):
    status, answer = await api.post(path, body)
    assert status == 400 and answer["error"]["message"].endswith(f"did you mean {meant!r}?"), answer


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def with_call(call=CALL, **fields):
    """A chat whose assistant called a tool, as a client sends it back."""
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "So:", "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        (with_call(parsed=None, id="msg_1", refusal=None, annotations=[{"type": "x"}]), with_call()),
        (with_call(reasoning_details=[{"text": "x"}], provider_specific_fields={"a": 1}), with_call()),
        (with_call(content=[]), with_call(content=None)),
        (with_call({**CALL, "index": 0, "provider_specific_fields": None}), with_call()),
        (with_call({**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}), with_call()),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
                }
            ],
            [{"role": "user", "content": "Hi"}],
        ),
        (
            [{"role": "user", "content": [{**chat("", noise(1))["messages"][0]["content"][0], "detail": "high"}]}],
            [{"role": "user", "content": [chat("", noise(1))["messages"][0]["content"][0]]}],
        ),
    ],
)
async def test_unknown_fields_of_messages_are_ignored(api, sent, plain):
    assert await content(api, {"messages": sent}) == await content(api, {"messages": plain})
    tokens = [await api.post("/tokenize", {"messages": messages}) for messages in (sent, plain)]
    assert tokens[0] == tokens[1] and tokens[0][0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "minimal", "verbosity": "high"},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": False},
        {"max_tokens": 4.0, "n": 1.0},
        {"seed": 7.0, "top_k": -1.0, "min_tokens": 0.0},
        {"logprobs": True, "top_logprobs": 2.0, "stop_token_ids": [3.0]},
    ],
)
async def test_options_that_clients_send_to_every_server(api, fields):
    assert await content(api, chat("Hi"), **fields) == await content(api, chat("Hi"))


@pytest.mark.parametrize("arguments", ['{"a":', '{"a": "x', "", '{"a": 1}}', "[1]", "so"])
async def test_a_call_that_was_cut_off_may_be_sent_back(api, arguments):
    messages = with_call({"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}})
    await content(api, {"messages": messages})
    _, answer = await api.post("/tokenize", {"messages": messages})
    _, said = await api.post("/detokenize", {"tokens": answer["tokens"]})
    assert f'"arguments": {arguments}' in said["prompt"] and "So:" in said["prompt"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    ],
)
async def test_a_model_for_pictures_refuses_sounds_by_name(api, part):
    status, answer = await api.post(CHATS, {"messages": [{"role": "user", "content": [part]}]})
    error = answer["error"]
    assert (status, error["code"]) == (400, "unsupported_media")
    assert error["param"].startswith("messages[0].content[0].")


async def test_a_model_for_pictures_transcribes_nothing(api):
    form = {"file": io.BytesIO(b"RIFF")}
    async with api.session.post(api.url + "/v1/audio/transcriptions", data=form) as answer:
        status, error = answer.status, (await answer.json())["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_media", "file")
