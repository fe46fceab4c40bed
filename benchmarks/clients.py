"""Client libraries against a running deployment: pictures, streams, tools, structured output, messages sent back.

Run in an environment that has the libraries; a library that is not installed is a skipped row::

    pip install openai langchain-openai 'pydantic-ai-slim[openai]' openai-agents 'smolagents[openai]' instructor \
        litellm
    epd-serve up deploy/demo.yaml        # elsewhere
    python benchmarks/clients.py http://127.0.0.1:8000 --output benchmarks/results/clients.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.metadata
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "demo"
CELLS = ("picture", "stream", "tools", "structured", "sent back")


class Paint(BaseModel):
    """Paint the wall."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})
    colour: Literal["red", "blue"]


def paint(colour: Literal["red", "blue"]) -> str:
    """Paint the wall.

    Args:
        colour: of the wall.
    """
    return f"painted {colour}"


def png(size: int = 28) -> bytes:
    """A red picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff\0\0" * size) * size)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PICTURE = "data:image/png;base64," + base64.b64encode(png()).decode()
SHOWN = [{"type": "text", "text": "What colour?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
ASKED = [{"role": "user", "content": "Paint it"}]
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint the wall.", "parameters": Paint.model_json_schema()},
}


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions


class OpenAIClient:
    def picture(self, url: str) -> str:
        messages = [{"role": "user", "content": SHOWN}]
        return str(_openai(url).create(model=MODEL, messages=messages, max_tokens=8).choices[0].message.content)

    def stream(self, url: str) -> str:
        with _openai(url).stream(model=MODEL, messages=ASKED, max_tokens=8) as stream:
            return str(stream.get_final_completion().choices[0].message.content)

    def tools(self, url: str) -> str:
        call = _openai(url).create(model=MODEL, messages=ASKED, tools=[TOOL], tool_choice="required")
        return str(Paint.model_validate_json(call.choices[0].message.tool_calls[0].function.arguments))

    def structured(self, url: str) -> str:
        class Wall(BaseModel):
            colour: Literal["red", "blue"]

        return str(
            Wall.model_validate(
                _openai(url).parse(model=MODEL, messages=ASKED, response_format=Wall).choices[0].message.parsed
            )
        )

    def sent_back(self, url: str) -> str:
        """The message of ``parse``, with all the fields that the client adds to it."""
        import openai

        tool = openai.pydantic_function_tool(Paint, name="paint")
        tool["function"]["strict"] = True
        said = (
            _openai(url)
            .parse(model=MODEL, messages=ASKED, tools=[tool], tool_choice="required")
            .choices[0]
            .message
        )
        done = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "painted"}
        messages = [*ASKED, said.to_dict(), done]
        return str(
            _openai(url)
            .create(model=MODEL, messages=messages, tools=[tool], max_tokens=8)
            .choices[0]
            .finish_reason
        )


def _langchain(url: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, **more)


class LangChain:
    def picture(self, url: str) -> str:
        return str(_langchain(url, max_tokens=8).invoke([{"role": "user", "content": SHOWN}]).content)

    def stream(self, url: str) -> str:
        return "".join(str(one.content) for one in _langchain(url, max_tokens=8).stream(ASKED))

    def tools(self, url: str) -> str:
        return paint(**_langchain(url).bind_tools([Paint], tool_choice="any").invoke(ASKED).tool_calls[0]["args"])

    def structured(self, url: str) -> str:
        ways = ("function_calling", "json_schema")
        return str(
            [_langchain(url).with_structured_output(Paint, method=way).invoke(ASKED).colour for way in ways]
        )

    def sent_back(self, url: str) -> str:
        from langchain_core.messages import HumanMessage, ToolMessage

        said = _langchain(url).bind_tools([Paint], tool_choice="any").invoke(ASKED)
        done = [ToolMessage("painted", tool_call_id=call["id"]) for call in said.tool_calls]
        return str(
            _langchain(url, max_tokens=8)
            .invoke([HumanMessage("Paint it"), said, *done])
            .response_metadata["finish_reason"]
        )


def _pydantic_ai(url: str, **more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, **more)


class PydanticAI:
    def picture(self, url: str) -> str:
        from pydantic_ai import BinaryContent

        shown = ["What colour?", BinaryContent(png(), media_type="image/png")]
        return str(_pydantic_ai(url, model_settings={"max_tokens": 8}).run_sync(shown).output)

    def stream(self, url: str) -> str:
        async def stream() -> str:
            async with _pydantic_ai(url, model_settings={"max_tokens": 8}).run_stream("Say hello") as answer:
                return "".join([piece async for piece in answer.stream_text(delta=True)])

        return asyncio.run(stream())

    def tools(self, url: str) -> str:
        return str(_pydantic_ai(url, output_type=Paint).run_sync("Paint it").output)

    def structured(self, url: str) -> str:
        from pydantic_ai import NativeOutput

        return str(_pydantic_ai(url, output_type=NativeOutput(Paint)).run_sync("Paint it").output)

    def sent_back(self, url: str) -> str:
        first = _pydantic_ai(url, output_type=Paint).run_sync("Paint it")
        agent = _pydantic_ai(url, output_type=Paint)
        return str(agent.run_sync("Once more", message_history=first.all_messages()).output)


def _agents(url: str, *, content: Any = "Paint it", streamed: bool = False, **more: Any) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        settings = agents.ModelSettings(max_tokens=48, **more.pop("settings", {}))
        model = agents.OpenAIChatCompletionsModel(MODEL, client)
        agent = agents.Agent(name="a", model=model, model_settings=settings, **more)
        asked = [{"role": "user", "content": content}]
        if not streamed:
            return str((await agents.Runner.run(agent, asked, max_turns=4)).final_output)
        run = agents.Runner.run_streamed(agent, asked)
        return f"{len([event async for event in run.stream_events()])} events"

    return asyncio.run(run())


class OpenAIAgents:
    def picture(self, url: str) -> str:
        return _agents(
            url, content=[{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": PICTURE}]
        )

    def stream(self, url: str) -> str:
        return _agents(url, streamed=True)

    def tools(self, url: str) -> str:
        import agents

        tools, settings = [agents.function_tool(paint)], {"tool_choice": "required"}
        return _agents(url, tools=tools, settings=settings, tool_use_behavior="stop_on_first_tool")

    def structured(self, url: str) -> str:
        class Wall(BaseModel):
            colour: Literal["red", "blue"]

        return _agents(url, output_type=Wall)

    def sent_back(self, url: str) -> str:
        """The call goes back with its result, and the model answers."""
        import agents

        return _agents(url, tools=[agents.function_tool(paint)], settings={"tool_choice": "required"})


def _smol(url: str, **more: Any) -> Any:
    from smolagents import OpenAIModel

    return OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none", **more)


def _smol_messages(content: Any) -> list[Any]:
    from smolagents import ChatMessage

    return [ChatMessage(role="user", content=content)]


class SmolAgents:
    def picture(self, url: str) -> str:
        return str(_smol(url, max_tokens=8)(_smol_messages(SHOWN)).content)

    def stream(self, url: str) -> str:
        pieces = _smol(url, max_tokens=8).generate_stream(_smol_messages([SHOWN[0]]))
        return "".join(piece.content or "" for piece in pieces)

    def tools(self, url: str) -> str:
        return str(_smol_call(url)[1].tool_calls[0].function.arguments)

    def structured(self, url: str) -> str:
        asked = {"type": "json_schema", "json_schema": {"name": "wall", "schema": Paint.model_json_schema()}}
        return str(
            Paint.model_validate_json(_smol(url)(_smol_messages([SHOWN[0]]), response_format=asked).content)
        )

    def sent_back(self, url: str) -> str:
        asked, said = _smol_call(url)
        back = [*asked, said.dict() if hasattr(said, "dict") else said, *_smol_messages([SHOWN[0]])]
        return str(_smol(url, max_tokens=8)(back).content)


def _smol_call(url: str) -> Any:
    from smolagents import tool

    asked = _smol_messages([{"type": "text", "text": "Paint it"}])
    return asked, _smol(url)(asked, tools_to_call_from=[tool(paint)])


def _instructor(url: str, mode: str = "TOOLS", **fields: Any) -> Any:
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": ASKED, "response_model": Paint, "max_retries": 0, **fields}
    return instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions, asked


class Instructor:
    def picture(self, url: str) -> str:
        chat, asked = _instructor(url, messages=[{"role": "user", "content": SHOWN}])
        return str(chat.create(**asked))

    def stream(self, url: str) -> str:
        chat, asked = _instructor(url)
        return str(list(chat.create_partial(**asked))[-1])

    def tools(self, url: str) -> str:
        chat, asked = _instructor(url)
        return str(chat.create(**asked))

    def structured(self, url: str) -> str:
        chat, asked = _instructor(url, "JSON_SCHEMA")
        return str(chat.create(**asked))

    def sent_back(self, url: str) -> str:
        chat, asked = _instructor(url)
        _, raw = chat.create_with_completion(**asked)
        said = raw.choices[0].message
        done = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "painted"}
        return str(chat.create(**{**asked, "messages": [*ASKED, said.model_dump(), done, *ASKED]}))


def _litellm(url: str, provider: str, **fields: Any) -> Any:
    import litellm

    asked = {"messages": ASKED, "max_tokens": 32, **fields}
    return litellm.completion(model=f"{provider}/{MODEL}", api_base=f"{url}/v1", api_key="none", **asked)


def litellm_cells(provider: str) -> dict[str, Callable[[str], str]]:
    def picture(url: str) -> str:
        return str(
            _litellm(url, provider, messages=[{"role": "user", "content": SHOWN}]).choices[0].message.content
        )

    def stream(url: str) -> str:
        return "".join(one.choices[0].delta.content or "" for one in _litellm(url, provider, stream=True))

    def call(url: str) -> Any:
        return _litellm(url, provider, tools=[TOOL], tool_choice="required").choices[0].message

    def tools(url: str) -> str:
        return str(Paint.model_validate_json(call(url).tool_calls[0].function.arguments))

    def structured(url: str) -> str:
        return str(
            Paint.model_validate_json(_litellm(url, provider, response_format=Paint).choices[0].message.content)
        )

    def sent_back(url: str) -> str:
        said = call(url)
        done = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "painted"}
        return str(_litellm(url, provider, messages=[*ASKED, said, done], tools=[TOOL]).choices[0].finish_reason)

    return dict(zip(CELLS, (picture, stream, tools, structured, sent_back), strict=True))


def _cells(client: Any) -> dict[str, Callable[[str], str]]:
    return {cell: getattr(client, cell.replace(" ", "_")) for cell in CELLS}


#: Row → the package whose version it shows, and its cells.
CLIENTS: dict[str, tuple[str, dict[str, Callable[[str], str]]]] = {
    "openai": ("openai", _cells(OpenAIClient())),
    "LangChain": ("langchain-openai", _cells(LangChain())),
    "pydantic-ai": ("pydantic-ai-slim", _cells(PydanticAI())),
    "openai-agents": ("openai-agents", _cells(OpenAIAgents())),
    "smolagents": ("smolagents", _cells(SmolAgents())),
    "instructor": ("instructor", _cells(Instructor())),
    "LiteLLM openai/": ("litellm", litellm_cells(OpenAIClient())),
    "LiteLLM hosted_vllm/": ("litellm", litellm_cells("hosted_vllm")),
}


def run_row(name: str, url: str) -> dict[str, str]:
    """The cells of a client: "ok", or the error; "skipped" where it is not installed."""
    package, cells = CLIENTS[name]
    try:
        row = {"version": importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return dict.fromkeys(CELLS, "skipped")
    for cell, ask in cells.items():
        try:
            ask(url)
            row[cell] = "ok"
        except Exception as error:  # noqa: BLE001 - the table shows it
            row[cell] = f"{type(error).__name__}: {error}"[:300]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--only", choices=CLIENTS, action="append")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    print(" | ".join(["client", "version", *CELLS]))
    rows: dict[str, dict[str, str]] = {}
    for name in args.only or CLIENTS:
        rows[name] = row = run_row(name, args.url)
        print(" | ".join([name, row.get("version", "-"), *(row[cell][:60] for cell in CELLS)]), flush=True)
    if args.output is not None:
        command = f"python benchmarks/clients.py {args.url} --output {args.output}"
        args.output.write_text(
            json.dumps({"command": command, "clients": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
