"""Fields and calls of real clients that other servers take; and what a client that errs is told."""

import pytest
from chat import chat, data_url
from pictures import noise, png

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIELDS = {"temperature": 0, "max_tokens": 4}
CHATS = "/v1/chat/completions"


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
    plain = [*user("Hi"), {"role": "assistant", "content": "Ho"}, *user("?")]
    rich = [{**message, "name": "bob"} for message in plain]
    rich[1] |= {"reasoning_content": "They greet."}
    tokenizer = api.instances["ep0"].weights.prompts.tokenizer.inner
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


async def test_health_by_its_head(api):
    for path in ("/health", "/health/ready", "/health/live"):
        async with api.session.head(api.url + path) as response:
            assert response.status == 200 and await response.read() == b""


PICTURE = chat("", noise(1))["messages"][0]["content"][0]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content):
    return [{"role": "user", "content": content}]


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
        (user([{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]), user("Hi")),
        (user([{**PICTURE, "detail": "high"}]), user([PICTURE])),
        ([{**user("Hi")[0], "tool_calls": []}], user("Hi")),
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
