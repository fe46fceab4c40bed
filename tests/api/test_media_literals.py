"""A text that spells a token which stands for media is text, beside pictures too."""

import pytest
from chat import chat
from pictures import noise

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIELDS = {"temperature": 0, "max_tokens": 6}
SPELLINGS = ["<|image_pad|>", "<|vision_start|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"]


async def tokens(api, body):
    status, answer = await api.post("/tokenize", {k: v for k, v in body.items() if k in ("messages", "tools")})
    assert status == 200, answer
    return answer["tokens"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("pictures", [0, 2])
async def test_beside_pictures_and_without(api, spelling, pictures):
    images = [noise(number) for number in range(pictures)]
    body = chat(f"What is\ue000 {spelling} and{spelling}?", *images, **FIELDS)
    status, answer = await api.post("/v1/chat/completions", body)
    assert status == 200, answer
    other = chat(f"What is\ue000 {spelling.replace('|', '!')} and{spelling.replace('|', '!')}?", *images)
    ids, marked = await tokens(api, body), await tokens(api, other)
    for name in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"):
        _, one = await api.post("/tokenize", {"prompt": name})
        assert ids.count(one["tokens"][0]) == marked.count(one["tokens"][0])
    _, said = await api.post("/detokenize", {"tokens": ids})
    _, expected = await api.post("/detokenize", {"tokens": marked})
    assert said["prompt"] == expected["prompt"].replace("!", "|")
    await api.settle()


async def test_in_tools_calls_and_results(api):
    spelling = SPELLINGS[0]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{spelling}"}}'}}
    body = chat("Call it", noise(1))
    body["tools"] = [{"type": "function", "function": {"name": "f", "description": spelling}}]
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": spelling},
    ]
    status, answer = await api.post("/v1/chat/completions", {**body, **FIELDS})
    assert status == 200, answer
    _, said = await api.post("/detokenize", {"tokens": await tokens(api, body)})
    picture = said["prompt"].split("<|vision_start|>")[1].split("<|vision_end|>")[0]
    assert said["prompt"].count(spelling) == 3 + picture.count(spelling)
