"""Structured output and tools with random weights: whatever the model would say, the grammar holds."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import openai
import pytest
from http_client import http_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADDRESS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "zip": {"type": "integer", "minimum": 10000, "maximum": 99999},
        "kind": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "tags", "zip", "kind"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", 'the "old" town']},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": PLACE},
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}
MESSAGES = [{"role": "user", "content": "Tell me"}]


@pytest.fixture
async def client(api):
    async with openai.AsyncOpenAI(
        base_url=f"{api.url}/v1", api_key="none", max_retries=0, http_client=http_client()
    ) as client:
        yield client


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "address", "schema": schema, "strict": True}}


async def ask(client, **fields):
    return await client.chat.completions.create(model="demo", messages=MESSAGES, **fields)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_every_choice_follows_the_schema(client, temperature):
    answer = await ask(client, response_format=schema_format(ADDRESS), n=3, temperature=temperature, seed=1)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), ADDRESS)
        assert choice.finish_reason == "stop"
    texts = {choice.message.content for choice in answer.choices}
    assert len(texts) == (1 if temperature == 0 else 3)


async def test_a_stream_and_a_batch_say_the_same(client):
    fields = {"response_format": schema_format(ADDRESS), "temperature": 0.8}
    seeds = range(3)
    whole = await asyncio.gather(*(ask(client, seed=seed, **fields) for seed in seeds))
    for seed, answer in zip(seeds, whole, strict=True):
        stream = await ask(client, seed=seed, stream=True, **fields)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content
        jsonschema.validate(json.loads(text), ADDRESS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_tool_that_must_be_called_is(client, choice):
    fields = {"tools": [CLOCK, WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(2):
        answer = (await ask(client, seed=seed, **fields)).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        [call] = answer.message.tool_calls
        function = {"get_time": CLOCK, "get_weather": WEATHER}[call.function.name]["function"]
        jsonschema.validate(json.loads(call.function.arguments), function["parameters"])
        if choice != "required":
            assert call.function.name == "get_weather"
        async with client.chat.completions.stream(model="demo", messages=MESSAGES, seed=seed, **fields) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        [other] = streamed.message.tool_calls
        assert (other.function.name, other.function.arguments) == (call.function.name, call.function.arguments)
        assert other.id.startswith("call_") and streamed.finish_reason == "tool_calls"


async def test_several_calls_at_once(client):
    for seed in range(30):
        answer = await ask(client, seed=seed, tools=[CLOCK], tool_choice="required", max_tokens=200)
        calls = answer.choices[0].message.tool_calls
        assert all(call.function.arguments == "{}" for call in calls)
        if len(calls) > 1:
            assert len({call.id for call in calls}) == len(calls)
            return
    raise AssertionError("never more than one")


async def test_calls_and_their_results_are_read_again(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    history = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    fields = {"model": "demo", "tools": [CLOCK], "max_tokens": 4, "temperature": 0}
    with_history = await client.chat.completions.create(messages=history, **fields)
    without = await client.chat.completions.create(messages=MESSAGES, **fields)
    assert with_history.usage.prompt_tokens > without.usage.prompt_tokens + 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "zebra"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"$ref": "http://x/y"})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}, *MESSAGES]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(api, fields, param):
    status, answer = await api.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert (status, answer.get("error", {}).get("param")) == (400 if param else 200, param), answer
