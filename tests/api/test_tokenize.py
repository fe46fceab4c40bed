"""/tokenize and /detokenize in vLLM's shapes: what they count is what a request is charged."""

import pytest
from chat import chat
from pictures import noise

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_prompt_and_its_tokens_are_the_same_thing(api):
    text = "How many apples are there? — zwei"
    status, answer = await api.post("/tokenize", {"model": "demo", "prompt": text, "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 5
    assert answer["max_model_len"] == 768
    status, back = await api.post("/detokenize", {"model": "demo", "tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": text})


@pytest.mark.parametrize("images", [0, 2])
async def test_a_chat_counts_what_usage_reports(api, images):
    body = chat("What is it?", *[noise(seed) for seed in range(images)])
    status, answer = await api.post("/tokenize", {"messages": body["messages"]})
    assert (status, answer["token_strs"]) == (200, None)
    status, completion = await api.post("/v1/chat/completions", {**body, "max_tokens": 1})
    assert status == 200
    assert completion["usage"]["prompt_tokens"] == answer["count"]
    if images:
        assert answer["count"] >= 40
