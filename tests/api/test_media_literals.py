"""A text that spells a token which stands for media is text, beside pictures too."""

import pytest
from chat import chat
from pictures import noise

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIELDS = {"temperature": 0, "max_tokens": 6}


async def tokens(api, body):
    status, answer = await api.post("/tokenize", {k: v for k, v in body.items() if k in ("messages", "tools")})
    assert status == 200, answer
    return answer["tokens"]


async def test_in_texts_tools_calls_and_results(api):
    spelling = "<|image_pad|>"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{spelling}"}}'}}
    body = chat(f"Call{spelling} it", noise(1))
    body["tools"] = [{"type": "function", "function": {"name": "f", "description": spelling}}]
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": spelling},
    ]
    status, answer = await api.post("/v1/chat/completions", {**body, **FIELDS})
    assert status == 200, answer
    _, said = await api.post("/detokenize", {"tokens": await tokens(api, body)})
    await api.settle()
    picture = said["prompt"].split("<|vision_start|>")[1].split("<|vision_end|>")[0]
    assert said["prompt"].count(spelling) == 4 + picture.count(spelling)
