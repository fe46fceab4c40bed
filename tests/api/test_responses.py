"""/v1/responses, by the openai client: the same tokens as a chat, in the events that its documentation lists."""

import json

import pytest
from chat import data_url
from pictures import noise, png

from epd_serve.protocol.openai.responses import ResponsesCall

pytestmark = pytest.mark.asyncio(loop_scope="session")

PICTURE = data_url(png(noise(3)))
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "measure", "parameters": SCHEMA, "strict": True}


async def test_a_response_has_the_text_of_the_chat(client):
    question = [{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": "What is it?"}]
    fields = {"model": "demo", "temperature": 0, "store": False, "metadata": {"a": "b"}}
    asked = {"instructions": "Be brief.", "input": [{"role": "user", "content": question}], "max_output_tokens": 6}
    response = await client.responses.create(**asked, **fields)
    content = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    chat = await client.chat.completions.create(messages=messages, max_completion_tokens=6, **fields)
    assert response.output_text == chat.choices[0].message.content != ""
    assert response.usage.input_tokens == chat.usage.prompt_tokens > 20
    assert response.usage.output_tokens == 6
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.metadata == {"a": "b"} and response.store is False and response.id.startswith("resp_")


async def test_the_events_of_a_stream_build_the_response(client):
    fields = {"model": "demo", "input": "Count!", "max_output_tokens": 5, "temperature": 0}
    whole = await client.responses.create(**fields)
    stream = await client.responses.create(**fields, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    begin = "created", "in_progress", "output_item.added", "content_part.added"
    end = "output_text.done", "content_part.done", "output_item.done", "incomplete"
    assert names[:4] == [f"response.{name}" for name in begin]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [f"response.{name}" for name in end]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    assert events[0].response.id == events[-1].response.id and events[0].response.output == []


async def test_items_of_an_answer_go_back_with_all_their_fields(client):
    """The client library writes fields that only other models fill, such as ``phase``, as nulls."""
    turn = {"role": "user", "content": "How large?"}
    fields = {"model": "demo", "temperature": 0, "max_output_tokens": 60}
    answer = await client.responses.create(input=[turn], **fields)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    call = await client.responses.create(input=[turn], tools=[tool], tool_choice="required", **fields)
    items = [item.model_dump() for item in (*answer.output, *call.output)]
    assert [item["type"] for item in items] == ["message", "function_call"] and None in items[0].values()
    result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "3 m"}
    again = await client.responses.create(input=[turn, *items, result], **fields)
    assert again.usage.input_tokens > answer.usage.input_tokens + 20
    await client.responses.create(input=[turn, {**items[0], "phase": "commentary"}], **fields)


async def test_a_response_follows_its_schema(client):
    text = {"format": {"type": "json_schema", "name": "size", "schema": SCHEMA, "strict": True}}
    response = await client.responses.create(model="demo", input="Size?", text=text, extra_body={"seed": 5})
    answer = json.loads(response.output_text)
    assert response.status == "completed" and 1 <= answer["size"] <= 99 and answer["ok"] in (True, False)


async def test_a_required_tool_is_called(client):
    fields = {"model": "demo", "input": "Size?", "tools": [TOOL], "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False, "extra_body": {"seed": 7}}
    whole = await client.responses.create(**fields)
    events = [e async for e in await client.responses.create(stream=True, **fields)]
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    [call], [streamed] = whole.output, events[-1].response.output
    assert len(pieces) > 3 and "".join(pieces) == streamed.arguments == call.arguments
    kinds = "created", "in_progress", "output_item.added", "output_item.done", "completed"
    assert [e.type for e in events if "function_call" not in e.type] == [f"response.{kind}" for kind in kinds]
    assert (call.type, call.name) == ("function_call", "measure") and call.call_id.startswith("call_")
    assert set(json.loads(call.arguments)) == {"size", "ok"}


async def test_an_error_before_the_first_token_is_an_event_of_a_begun_response():
    """The openai client's accumulator refuses a stream that begins with anything but response.created."""
    call = ResponsesCall.parse(b'{"input": "Hi", "stream": true}')
    told = call.translation(id="1", created=0, model="demo").events(
        b'{"error": {"message": "lost", "code": null}}'
    )
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: ")]
    names = ["response.created", "response.in_progress", "response.failed", "error"]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
