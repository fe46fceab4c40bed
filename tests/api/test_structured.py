"""Structured output and tools with random weights: whatever the model would say, the grammar holds."""

import json

import jsonschema
import pytest

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
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}
MESSAGES = [{"role": "user", "content": "Tell me"}]


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "address", "schema": schema, "strict": True}}


async def ask(client, **fields):
    return await client.chat.completions.create(model="demo", messages=MESSAGES, **fields)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_every_choice_follows_the_schema_streamed_or_not(client, temperature):
    fields = {"response_format": schema_format(ADDRESS), "n": 3, "temperature": temperature, "seed": 1}
    answer = await ask(client, **fields)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), ADDRESS)
        assert choice.finish_reason == "stop"
    texts = [choice.message.content for choice in answer.choices]
    chunks = [chunk async for chunk in await ask(client, stream=True, **fields)]
    for index, text in enumerate(texts):
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(pieces) == text
    assert len(set(texts)) == (1 if temperature == 0 else 3)


async def test_several_calls_at_once(client):
    for seed in range(30):
        answer = await ask(client, seed=seed, tools=[CLOCK], tool_choice="required", max_tokens=200)
        calls = answer.choices[0].message.tool_calls
        assert all(call.function.arguments == "{}" for call in calls)
        if len(calls) > 1:
            assert len({call.id for call in calls}) == len(calls)
            return
    raise AssertionError("never more than one")
