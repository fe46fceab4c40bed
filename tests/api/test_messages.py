"""Anthropic's messages, and thinking in every API, by a model like Qwen3.5: thoughts in tags, calls as XML."""

import json

import jsonschema
import pytest
from chat import data_url
from pictures import noise, png

from epd_serve.protocol.anthropic import CountTokensCall, MessageBuilder

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES, CHATS, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
    "required": ["colour", "count"],
}
TOOL = {"name": "paint", "input_schema": SCHEMA}


async def whole(api, path, body):
    greedy = {} if "count" in path or "token" in path else {"temperature": 0}
    status, answer = await api.post(path, {**greedy, **body})
    assert status == 200, answer
    return answer


async def events(api, path, body):
    return await api.events(path, {"temperature": 0, **body})


def built(told):
    """The blocks that a stream's events make, as Anthropic's clients join them."""
    blocks = []
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "json")
            blocks[event["index"]][field] += delta.get("partial_json", delta.get(field))
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return blocks


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ["text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, ["thinking", "text"]),
        ({"thinking": {"type": "adaptive"}}, ["thinking"]),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ["tool_use"]),
        (
            {
                "tools": [TOOL],
                "thinking": {"type": "enabled", "budget_tokens": 4},
                "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
            },
            ["thinking", "tool_use"],
        ),
        ({"system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["xyz"], "top_k": 5}, ["text"]),
    ],
)
async def test_a_message_and_its_events_are_the_same(thinker, fields, kinds):
    picture = {"type": "base64", "media_type": "image/png", "data": data_url(png(noise(3))).partition(",")[2]}
    turns = [*HI, {"role": "assistant", "content": "So?"}]
    turns.append({"role": "user", "content": [{"type": "image", "source": picture}]})
    body = {"messages": turns, "max_tokens": 200 if "tools" in fields else 12, **fields}
    answer, told = await whole(thinker, MESSAGES, body), await events(thinker, MESSAGES, body)
    content = answer["content"]
    assert [block["type"] for block in content] == kinds
    without_ids = [[{**block, "id": ""} for block in blocks] for blocks in (built(told), content)]
    assert without_ids[0] == without_ids[1]
    assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
    assert told[0]["message"]["usage"]["input_tokens"] == answer["usage"]["input_tokens"]
    assert told[-2]["usage"] == answer["usage"]
    assert told[-2]["delta"]["stop_reason"] == answer["stop_reason"]
    assert answer["stop_reason"] == ("tool_use" if "tools" in fields else "max_tokens")
    if "tools" in fields:
        jsonschema.validate(content[-1]["input"], SCHEMA)
    count = await whole(thinker, f"{MESSAGES}/count_tokens", {k: body[k] for k in body if k in COUNTED})
    assert count["input_tokens"] == answer["usage"]["input_tokens"]
    back = {"role": "assistant", "content": content}
    done = [{"type": "tool_result", "tool_use_id": one["id"], "content": "ok"} for one in content if "id" in one]
    asked = {"role": "user", "content": [*done, {"type": "text", "text": "Go on"}]}
    again = await whole(thinker, MESSAGES, {**body, "messages": [*turns, back, asked]})
    assert again["usage"]["input_tokens"] > answer["usage"]["input_tokens"] + 5


COUNTED = ("messages", "tools", "tool_choice", "thinking", "system")


@pytest.mark.parametrize(
    ("fields", "is_thought"),
    [
        ({"thinking_token_budget": 3}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_thinking_is_apart_from_the_content(thinker, fields, is_thought):
    """With a structured answer behind it, in chats and in responses."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    body = {"messages": HI, "max_tokens": 60, "response_format": form, **fields}
    answer = await whole(thinker, CHATS, body)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert bool(message.get("reasoning_content")) == is_thought
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3 * is_thought
    deltas = [chunk["choices"][0]["delta"] for chunk in await events(thinker, CHATS, body)]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (message.get(field) or "")
    back = [*HI, {**message, "content": "so"}, {"role": "user", "content": "Why?"}]
    await whole(thinker, CHATS, {"messages": back, "max_tokens": 1})


async def test_a_response_has_its_reasoning_in_an_item_of_its_own(thinker):
    body = {"input": HI, "max_output_tokens": 8}
    answer, told = await whole(thinker, RESPONSES, body), await events(thinker, RESPONSES, body)
    [item] = answer["output"]
    thought = item["content"][0]["text"]
    assert (item["type"], item["summary"], item["content"][0]["type"]) == ("reasoning", [], "reasoning_text")
    assert "".join(one["delta"] for one in told if one["type"] == "response.reasoning_text.delta") == thought
    assert told[-1]["response"]["output"][0]["content"] == item["content"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
    assert told[-1]["response"]["usage"] == answer["usage"]
    said = {"role": "assistant", "content": "So."}
    lengths = [
        (await whole(thinker, f"{RESPONSES}/input_tokens", {"input": [*HI, *items, *HI]}))["input_tokens"]
        for items in ([said], [item, said])
    ]
    assert lengths[0] < lengths[1]


async def test_the_ids_of_tokens_are_those_of_prompt_and_answer(thinker):
    body = {"messages": HI, "max_tokens": 6, "return_token_ids": True}
    answer, told = await whole(thinker, CHATS, body), await events(thinker, CHATS, body)
    prompt = (await whole(thinker, "/tokenize", {"messages": HI}))["tokens"]
    ids = answer["choices"][0]["token_ids"]
    assert answer["prompt_token_ids"] == prompt == told[0]["prompt_token_ids"] and len(ids) == 6
    assert [one for chunk in told for one in chunk["choices"][0]["token_ids"]] == ids
    completion = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True}
    choice = (await whole(thinker, "/v1/completions", completion))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, ids)


async def test_max_tokens_of_a_larger_model_are_bounded_by_the_context(thinker):
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = {"messages": HI, "max_tokens": 16_384, "output_config": config}
    answer = await whole(thinker, MESSAGES, body)
    assert json.loads(answer["content"][0]["text"]) == {"a": "b"} and answer["stop_reason"] == "end_turn"


async def test_a_stop_sequence_is_named():
    choice = {"finish_reason": "stop", "stop_reason": "END", "message": {"content": "so "}}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 1}
    chat = json.dumps({"choices": [choice], "usage": usage}).encode()
    made = json.loads(MessageBuilder(id="1", model="m").whole(chat))
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "END")
    assert (made["usage"]["input_tokens"], made["usage"]["cache_read_input_tokens"]) == (5, 4)
    assert (made["usage"]["output_tokens"], made["usage"]["output_tokens_details"]) == (2, {"thinking_tokens": 1})


async def test_results_of_tools_come_before_what_the_user_says():
    turn = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3 m"}]},
        {"type": "text", "text": "And?"},
    ]
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    body = {"messages": [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": turn}]}
    chat = CountTokensCall.parse(json.dumps(body).encode()).chat()
    assert chat is not None and [one.role for one in chat] == ["user", "assistant", "tool", "user"]
    assert chat[1].tool_calls[0].name == "f" and chat[2].tool_call_id == "c1"
