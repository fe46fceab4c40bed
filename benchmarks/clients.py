"""Client libraries against a running deployment: pictures, streams, tools, structured output, messages sent back.

Run in an environment that has the libraries; a library that is not installed is a skipped row::

    pip install openai langchain-openai 'pydantic-ai-slim[openai]' openai-agents 'smolagents[openai]' instructor \
        litellm
    epd-serve up        # elsewhere: the demo model
    python benchmarks/clients.py http://127.0.0.1:8000 --output benchmarks/results/clients.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "demo"
CELLS = ("picture", "stream", "tools", "structured", "sent back")


class Paint(BaseModel):
    """Paint the wall."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})
    colour: Literal["red", "blue"]


class Wall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]


def paint(colour: Literal["red", "blue"]) -> str:
    """Paint the wall.

    Args:
        colour: of the wall.
    """
    return f"painted {colour}"


#: A red picture of 28 x 28 pixels.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAABwAAAAcCAIAAAD9b0jDAAAAJUlEQVR4nGP4z8BAdUR9E0cNHTV01NBRQ0cNHTV01NBRQweloQAO"
    "yg0e8L+IEAAAAABJRU5ErkJggg=="
)
PICTURE = f"data:image/png;base64,{PNG}"
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
    def picture(self, url: str) -> Any:
        return _openai(url).create(model=MODEL, messages=[{"role": "user", "content": SHOWN}], max_tokens=8)

    def stream(self, url: str) -> Any:
        with _openai(url).stream(model=MODEL, messages=ASKED, response_format=Wall) as stream:
            return stream.get_final_completion()

    def tools(self, url: str) -> Any:
        said = _openai(url).create(model=MODEL, messages=ASKED, tools=[TOOL], tool_choice="required")
        return Paint.model_validate_json(said.choices[0].message.tool_calls[0].function.arguments)

    def structured(self, url: str) -> Any:
        said = _openai(url).parse(model=MODEL, messages=ASKED, response_format=Wall)
        return said.choices[0].message.parsed.colour

    def sent_back(self, url: str) -> Any:
        """The message of ``parse``, with all the fields that the client adds to it."""
        import openai

        tool = openai.pydantic_function_tool(Wall, name="paint")
        said = _openai(url).parse(model=MODEL, messages=ASKED, tools=[tool], tool_choice="required")
        message = said.choices[0].message
        done = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "painted"}
        return _openai(url).create(model=MODEL, messages=[*ASKED, message.to_dict(), done], max_tokens=8)


def _langchain(url: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, **more)


class LangChain:
    def picture(self, url: str) -> Any:
        return _langchain(url, max_tokens=8).invoke([{"role": "user", "content": SHOWN}])

    def stream(self, url: str) -> Any:
        return list(_langchain(url, max_tokens=8).stream(ASKED))

    def tools(self, url: str) -> Any:
        return paint(**_langchain(url).bind_tools([Paint], tool_choice="any").invoke(ASKED).tool_calls[0]["args"])

    def structured(self, url: str) -> Any:
        ways = ("function_calling", "json_schema")
        return [_langchain(url).with_structured_output(Paint, method=way).invoke(ASKED).colour for way in ways]

    def sent_back(self, url: str) -> Any:
        from langchain_core.messages import HumanMessage, ToolMessage

        said = _langchain(url).bind_tools([Paint], tool_choice="any").invoke(ASKED)
        done = [ToolMessage("painted", tool_call_id=call["id"]) for call in said.tool_calls]
        return _langchain(url, max_tokens=8).invoke([HumanMessage("Paint it"), said, *done])


def _pydantic_ai(url: str, **more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, **more)


class PydanticAI:
    def picture(self, url: str) -> Any:
        from pydantic_ai import BinaryContent

        picture = BinaryContent(base64.b64decode(PNG), media_type="image/png")
        return _pydantic_ai(url, model_settings={"max_tokens": 8}).run_sync(["Which?", picture])

    def stream(self, url: str) -> Any:
        async def stream() -> str:
            async with _pydantic_ai(url, model_settings={"max_tokens": 8}).run_stream("Say hello") as answer:
                return "".join([piece async for piece in answer.stream_text(delta=True)])

        return asyncio.run(stream())

    def tools(self, url: str) -> Any:
        return _pydantic_ai(url, output_type=Paint).run_sync("Paint it")

    def structured(self, url: str) -> Any:
        from pydantic_ai import NativeOutput

        return _pydantic_ai(url, output_type=NativeOutput(Paint)).run_sync("Paint it")

    def sent_back(self, url: str) -> Any:
        return _pydantic_ai(url, model_settings={"max_tokens": 8}).run_sync(
            "Once more", message_history=self.tools(url).all_messages()
        )


def _agents(url: str, *, content: Any = "Paint it", streamed: bool = False, **more: Any) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    async def run() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        settings = agents.ModelSettings(max_tokens=48, **more.pop("settings", {}))
        model = agents.OpenAIChatCompletionsModel(MODEL, client)
        agent = agents.Agent(name="a", model=model, model_settings=settings, **more)
        asked = [{"role": "user", "content": content}]
        if not streamed:
            return await agents.Runner.run(agent, asked, max_turns=4)
        return [event async for event in agents.Runner.run_streamed(agent, asked).stream_events()]

    return asyncio.run(run())


class OpenAIAgents:
    def picture(self, url: str) -> Any:
        return _agents(url, content=[{"type": "input_image", "image_url": PICTURE}])

    def stream(self, url: str) -> Any:
        return _agents(url, streamed=True)

    def tools(self, url: str) -> Any:
        import agents

        tools, settings = [agents.function_tool(paint)], {"tool_choice": "required"}
        return _agents(url, tools=tools, settings=settings, tool_use_behavior="stop_on_first_tool")

    def structured(self, url: str) -> Any:
        return _agents(url, output_type=Wall)

    def sent_back(self, url: str) -> Any:
        """The call goes back with its result, and the model answers."""
        import agents

        return _agents(url, tools=[agents.function_tool(paint)], settings={"tool_choice": "required"})


def _smol(url: str, **more: Any) -> Any:
    from smolagents import OpenAIModel

    return OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none", **more)


def _smol_messages(content: Any, role: str = "user") -> list[Any]:
    from smolagents.models import ChatMessage, MessageRole

    return [ChatMessage(role=MessageRole(role), content=content)]


class SmolAgents:
    def picture(self, url: str) -> Any:
        return _smol(url, max_tokens=8)(_smol_messages(SHOWN))

    def stream(self, url: str) -> Any:
        return list(_smol(url, max_tokens=8).generate_stream(_smol_messages(SHOWN[:1])))

    def tools(self, url: str) -> Any:
        from smolagents import tool

        said = _smol(url)(_smol_messages(SHOWN[:1]), tools_to_call_from=[tool(paint)])
        return Paint.model_validate_json(said.tool_calls[0].function.arguments)

    def structured(self, url: str) -> Any:
        asked = {"type": "json_schema", "json_schema": {"name": "wall", "schema": Paint.model_json_schema()}}
        return Paint.model_validate_json(_smol(url)(_smol_messages(SHOWN[:1]), response_format=asked).content)

    def sent_back(self, url: str) -> Any:
        """A call and its result, as the memory of its agents writes them."""
        steps = {"tool-call": f"Calling tools: {self.tools(url)}", "tool-response": "painted"}
        back = [_smol_messages([{"type": "text", "text": text}], role)[0] for role, text in steps.items()]
        return _smol(url, max_tokens=8)([*_smol_messages(SHOWN[:1]), *back])


def _instructor(url: str, mode: str = "TOOLS", **fields: Any) -> Any:
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": ASKED, "response_model": Paint, "max_retries": 0, **fields}
    return instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions, asked


class Instructor:
    def picture(self, url: str) -> Any:
        chat, asked = _instructor(url, messages=[{"role": "user", "content": SHOWN}])
        return chat.create(**asked)

    def stream(self, url: str) -> Any:
        chat, asked = _instructor(url)
        return list(chat.create_partial(**asked))

    def tools(self, url: str) -> Any:
        chat, asked = _instructor(url)
        return chat.create(**asked)

    def structured(self, url: str) -> Any:
        chat, asked = _instructor(url, "JSON_SCHEMA")
        return chat.create(**asked)

    def sent_back(self, url: str) -> Any:
        chat, asked = _instructor(url)
        said = chat.create_with_completion(**asked)[1].choices[0].message
        done = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "painted"}
        return chat.create(**{**asked, "messages": [*ASKED, said.model_dump(), done, *ASKED]})


class LiteLLM:
    def __init__(self, provider: str) -> None:
        self.provider = provider

    def picture(self, url: str) -> Any:
        return self._ask(url, messages=[{"role": "user", "content": SHOWN}])

    def stream(self, url: str) -> Any:
        return list(self._ask(url, stream=True))

    def tools(self, url: str) -> Any:
        return Paint.model_validate_json(self._call(url).tool_calls[0].function.arguments)

    def structured(self, url: str) -> Any:
        return Paint.model_validate_json(self._ask(url, response_format=Paint).choices[0].message.content)

    def sent_back(self, url: str) -> Any:
        said = self._call(url)
        done = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "painted"}
        return self._ask(url, messages=[*ASKED, said, done], tools=[TOOL])

    def _call(self, url: str) -> Any:
        return self._ask(url, tools=[TOOL], tool_choice="required").choices[0].message

    def _ask(self, url: str, **fields: Any) -> Any:
        import litellm

        asked = {"messages": ASKED, "max_tokens": 64, **fields}
        return litellm.completion(model=f"{self.provider}/{MODEL}", api_base=f"{url}/v1", api_key="none", **asked)


#: Row → the package whose version it shows, and the client.
CLIENTS: dict[str, tuple[str, Any]] = {
    "openai": ("openai", OpenAIClient()),
    "LangChain": ("langchain-openai", LangChain()),
    "pydantic-ai": ("pydantic-ai-slim", PydanticAI()),
    "openai-agents": ("openai-agents", OpenAIAgents()),
    "smolagents": ("smolagents", SmolAgents()),
    "instructor": ("instructor", Instructor()),
    "LiteLLM openai/": ("litellm", LiteLLM("openai")),
    "LiteLLM hosted_vllm/": ("litellm", LiteLLM("hosted_vllm")),
}


def run_row(name: str, url: str) -> dict[str, str]:
    """The cells of a client: "ok", or the error; "skipped" where it is not installed."""
    package, client = CLIENTS[name]
    try:
        row = {"version": importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return dict.fromkeys(CELLS, "skipped")
    for cell in CELLS:
        try:
            getattr(client, cell.replace(" ", "_"))(url)
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
        result = {"command": f"python benchmarks/clients.py {args.url} --output {args.output}", "clients": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
