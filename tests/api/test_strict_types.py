"""The gateway's answers have the types of the newest openai client, checked strictly."""

import json
from typing import Any

import pytest
from chat import chat, data_url
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pictures import noise, png
from pydantic import TypeAdapter

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}
FLAT_TOOL = {"type": "function", **TOOL["function"]}
USAGE = {"stream_options": {"include_usage": True}}
CHATS: list[dict[str, Any]] = [
    {**chat("Hi", noise(1)), "max_tokens": 3},
    {**chat("Hi"), "max_tokens": 9, "temperature": 1.5, "logprobs": True, "top_logprobs": 2, "n": 2},
    {**chat("Hi"), "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2},
    {"prompt": "a", "max_tokens": 3},
]
PICTURE = {"type": "input_image", "image_url": data_url(png(noise(1))), "detail": "auto"}
RESPONSES: list[dict[str, Any]] = [
    {"input": "Hi", "max_output_tokens": 3, "include": ["reasoning.encrypted_content"]},
    {"input": [{"role": "user", "content": [PICTURE]}], "max_output_tokens": 2, "instructions": "Be brief."},
    {"input": "Hi", "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"input": "Hi", "max_output_tokens": 60, "tools": [FLAT_TOOL], "tool_choice": "required"},
]


def strictly(kind, data):
    return TypeAdapter(kind).validate_json(json.dumps(data), strict=True)


@pytest.mark.parametrize("body", CHATS)
async def test_chats(api, body):
    status, answer = await api.post("/v1/chat/completions", body)
    assert status == 200, answer
    strictly(ChatCompletion, answer)
    *chunks, last = await api.events("/v1/chat/completions", body | USAGE)
    for chunk in (*chunks, last):
        strictly(ChatCompletionChunk, chunk)
    assert all(chunk["usage"] is None for chunk in chunks) and last["usage"]["completion_tokens"] > 0
    assert all("usage" not in chunk for chunk in await api.events("/v1/chat/completions", body))


@pytest.mark.parametrize("body", COMPLETIONS)
async def test_completions(api, body):
    status, answer = await api.post("/v1/completions", body)
    assert status == 200, answer
    strictly(Completion, answer)
    *chunks, last = await api.events("/v1/completions", body | USAGE)
    for chunk in chunks:
        assert chunk["usage"] is None
        # openai says that an event of a completion has a finish_reason; its own server sends null until the end
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    for chunk in (*chunks, last):
        strictly(Completion, chunk)


@pytest.mark.parametrize("body", RESPONSES)
async def test_responses(api, body):
    status, answer = await api.post("/v1/responses", body)
    assert status == 200, answer
    strictly(Response, answer)
    told = await api.events("/v1/responses", body)
    assert len(told) > 6
    for event in told:
        strictly(ResponseStreamEvent, event)
    status, counted = await api.post("/v1/responses/input_tokens", {"input": body["input"]})
    assert status == 200, counted
    strictly(InputTokenCountResponse, counted)
    if "instructions" not in body and "tools" not in body:
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]


async def test_models(api):
    for path in ("/v1/models", "/v1/models/"):
        async with api.session.get(api.url + path) as response:
            assert response.status == 200
            page = await response.json()
    strictly(Model, page["data"][0])
