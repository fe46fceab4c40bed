"""OpenAI's own client: pictures, streams, tools, structured output, messages sent back, thinking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "demo"
#: Tokens of thinking, so that an answer follows.
BUDGET = {"thinking_token_budget": 6}


class Paint(BaseModel):
    """Paint the wall."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})
    colour: Literal["red", "blue"]


class Wall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]


#: A red picture of 28 x 28 pixels.
PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAJUlEQVR4nGP4z8BAdUR9E0cNHTV01NBRQ0cNHTV01NBRQweloQAO"
    "yg0e8L+IEAAAAABJRU5ErkJggg=="
)
SHOWN = [{"type": "text", "text": "What colour?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
ASKED = [{"role": "user", "content": "Paint it"}]
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint the wall.", "parameters": Paint.model_json_schema()},
}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def show_picture(url: str) -> None:
    chats: Any = client(url).chat.completions
    chats.create(model=MODEL, messages=[{"role": "user", "content": SHOWN}], max_tokens=8)


def stream(url: str) -> None:
    chats: Any = client(url).chat.completions
    with chats.stream(model=MODEL, messages=ASKED, response_format=Wall) as answer:
        answer.get_final_completion()


def call_tool(url: str) -> None:
    chats: Any = client(url).chat.completions
    said = chats.create(model=MODEL, messages=ASKED, tools=[TOOL], tool_choice="required")
    Paint.model_validate_json(said.choices[0].message.tool_calls[0].function.arguments)


def parse(url: str) -> None:
    chats: Any = client(url).chat.completions
    said = chats.parse(model=MODEL, messages=ASKED, response_format=Wall)
    assert said.choices[0].message.parsed.colour in ("red", "blue")


def send_back(url: str) -> None:
    """The message of ``parse``, with all the fields that the client adds to it."""
    chats: Any = client(url).chat.completions
    tool = openai.pydantic_function_tool(Wall, name="paint")
    said = chats.parse(model=MODEL, messages=ASKED, tools=[tool], tool_choice="required")
    message = said.choices[0].message
    done = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "painted"}
    chats.create(model=MODEL, messages=[*ASKED, message.to_dict(), done], max_tokens=8)


@pytest.mark.parametrize("ask", [show_picture, stream, call_tool, parse, send_back])
async def test_openais_own_client_gets_what_it_asks_for(ask: Callable[[str], None], api) -> None:
    await asyncio.to_thread(ask, api.url)


def think(url: str) -> None:
    """Whole, streamed, and as an item of a response."""
    chats: Any = client(url).chat.completions
    asked = {"model": MODEL, "messages": ASKED, "max_tokens": 12, "extra_body": BUDGET, "temperature": 0}
    whole = chats.create(**asked)
    [choice], details = whole.choices, whole.usage.completion_tokens_details
    deltas = [chunk.choices[0].delta for chunk in chats.create(**asked, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert choice.message.reasoning_content == thought != "" and details.reasoning_tokens == 6
    said: Any = client(url).responses.create(model=MODEL, input="Hi", max_output_tokens=8)
    assert said.output[0].type == "reasoning" and said.output[0].content[0].text


async def test_openais_own_client_sees_thinking(thinker) -> None:
    await asyncio.to_thread(think, thinker.url)
