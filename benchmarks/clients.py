"""Client libraries against running deployments: pictures, streams, tools, structured output, messages sent back,
thinking.

Run in an environment that has the libraries. A row whose library is not installed is left out; ``--output`` keeps
the rows that a run in another environment has written, and writes a table beside the JSON::

    pip install openai langchain-openai 'pydantic-ai-slim[openai]' openai-agents 'smolagents[openai]' instructor \
        litellm
    pip install anthropic 'pydantic-ai-slim[anthropic]' llama-index-llms-openai-like   # may need one of their own
    PYTHONPATH=tests/support python -c 'import sys, pathlib, tiny_models as tiny
    tiny.make_tiny_model("qwen3_5", pathlib.Path("thinker"), thinks=True)'
    epd-serve up                                  # elsewhere: the demo model
    epd-serve up ./thinker --served-model-name demo --port 8001    # elsewhere: a random Qwen3.5 that thinks
    python benchmarks/clients.py http://127.0.0.1:8000 --thinker http://127.0.0.1:8001 \
        --output benchmarks/results/clients.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "demo"
CELLS = ("picture", "stream", "tools", "structured", "sent back", "thinking")
#: Tokens of thinking, so that an answer follows.
BUDGET = {"thinking_token_budget": 6}


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

    def thinking(self, url: str) -> Any:
        """Whole, streamed, and as an item of a response."""
        import openai

        asked = {"model": MODEL, "messages": ASKED, "max_tokens": 12, "extra_body": BUDGET, "temperature": 0}
        whole = _openai(url).create(**asked)
        [choice], details = whole.choices, whole.usage.completion_tokens_details
        deltas = [chunk.choices[0].delta for chunk in _openai(url).create(**asked, stream=True)]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert choice.message.reasoning_content == thought != "" and details.reasoning_tokens == 6
        responses = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).responses
        said = responses.create(model=MODEL, input="Hi", max_output_tokens=8)
        assert said.output[0].type == "reasoning" and said.output[0].content[0].text
        return choice.message.content


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

    def thinking(self, url: str) -> Any:
        """As a block of a response; of a chat, the library keeps the content alone."""
        said = _langchain(url, max_tokens=8, use_responses_api=True, output_version="responses/v1").invoke(ASKED)
        assert said.content[0]["type"] == "reasoning"
        assert _langchain(url, max_tokens=12, extra_body=BUDGET).invoke(ASKED).content


class PydanticAI:
    def __init__(self, api: Literal["openai", "anthropic"]) -> None:
        self.api = api

    def _agent(self, url: str, **more: Any) -> Any:
        from pydantic_ai import Agent

        if self.api == "anthropic":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            provider = AnthropicProvider(base_url=url, api_key="none")
            profile: Any = {"supports_json_schema_output": True}  # its table says so of Claude alone
            return Agent(AnthropicModel(MODEL, provider=provider, profile=profile), **more)
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
        return Agent(model, **more)

    def picture(self, url: str) -> Any:
        from pydantic_ai import BinaryContent

        picture = BinaryContent(base64.b64decode(PNG), media_type="image/png")
        return self._agent(url, model_settings={"max_tokens": 8}).run_sync(["Which?", picture])

    def stream(self, url: str) -> Any:
        async def stream() -> str:
            async with self._agent(url, model_settings={"max_tokens": 8}).run_stream("Say hello") as answer:
                return "".join([piece async for piece in answer.stream_text(delta=True)])

        return asyncio.run(stream())

    def tools(self, url: str) -> Any:
        return self._agent(url, output_type=Paint).run_sync("Paint it")

    def structured(self, url: str) -> Any:
        from pydantic_ai import NativeOutput

        return self._agent(url, output_type=NativeOutput(Paint)).run_sync("Paint it")

    def sent_back(self, url: str) -> Any:
        return self._agent(url, model_settings={"max_tokens": 8}).run_sync(
            "Once more", message_history=self.tools(url).all_messages()
        )

    def thinking(self, url: str) -> Any:
        settings = {"max_tokens": 12, "extra_body": BUDGET}
        if self.api == "anthropic":
            settings = {"max_tokens": 12, "anthropic_thinking": {"type": "enabled", "budget_tokens": 6}}
        said = self._agent(url, model_settings=settings).run_sync("Hi").new_messages()[-1]
        kinds = {part.part_kind for part in said.parts}
        assert {"thinking", "text"} <= kinds, kinds


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

    def thinking(self, url: str) -> Any:
        said = _agents(url, settings={"extra_body": BUDGET})
        kinds = [item.type for item in said.new_items]
        assert kinds == ["reasoning_item", "message_output_item"], kinds


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

    def thinking(self, url: str) -> Any:
        """The library keeps the content, and the server's answer beside it."""
        said = _smol(url, max_tokens=12, extra_body=BUDGET)(_smol_messages(SHOWN[:1]))
        assert said.content and said.raw.choices[0].message.reasoning_content


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
        """In the modes that enforce the schema; JSON and MD_JSON leave it to the model."""
        modes = [_instructor(url, mode) for mode in ("JSON_SCHEMA", "TOOLS_STRICT")]
        return [chat.create(**asked) for chat, asked in modes]

    def sent_back(self, url: str) -> Any:
        chat, asked = _instructor(url)
        said = chat.create_with_completion(**asked)[1].choices[0].message
        done = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "painted"}
        return chat.create(**{**asked, "messages": [*ASKED, said.model_dump(), done, *ASKED]})

    def thinking(self, url: str) -> Any:
        """A structured answer behind the thoughts."""
        chat, asked = _instructor(url, "JSON_SCHEMA", extra_body=BUDGET)
        wall, said = chat.create_with_completion(**asked)
        assert said.choices[0].message.reasoning_content
        return wall.colour


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

    def thinking(self, url: str) -> Any:
        said = self._ask(url, extra_body=BUDGET, max_tokens=12).choices[0].message
        assert said.content and said.reasoning_content

    def _call(self, url: str) -> Any:
        return self._ask(url, tools=[TOOL], tool_choice="required").choices[0].message

    def _ask(self, url: str, **fields: Any) -> Any:
        import litellm

        asked = {"messages": ASKED, "max_tokens": 64, **fields}
        return litellm.completion(model=f"{self.provider}/{MODEL}", api_base=f"{url}/v1", api_key="none", **asked)


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages


class AnthropicClient:
    tool: ClassVar = {"name": "paint", "input_schema": Paint.model_json_schema()}

    def picture(self, url: str) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": PNG}
        asked = [{"type": "image", "source": source}, {"type": "text", "text": "What colour?"}]
        turn = {"role": "user", "content": asked}
        said = _anthropic(url).create(model=MODEL, messages=[turn], max_tokens=8)
        counted = _anthropic(url).count_tokens(model=MODEL, messages=[turn]).input_tokens
        usage = said.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens > 5

    def stream(self, url: str) -> Any:
        with _anthropic(url).stream(model=MODEL, messages=ASKED, max_tokens=8) as stream:
            assert "".join(stream.text_stream) == stream.get_final_message().content[0].text

    def tools(self, url: str) -> Any:
        asked = {
            "model": MODEL,
            "messages": ASKED,
            "max_tokens": 99,
            "tools": [self.tool],
            "tool_choice": {"type": "any"},
        }
        with _anthropic(url).stream(**asked) as stream:
            Paint.model_validate(stream.get_final_message().content[0].input)
        said = _anthropic(url).create(**asked)
        assert said.stop_reason == "tool_use"
        return said.content[0]

    def structured(self, url: str) -> Any:
        said = _anthropic(url).parse(model=MODEL, messages=ASKED, max_tokens=99, output_format=Wall)
        return said.parsed_output.colour

    def sent_back(self, url: str) -> Any:
        call = self.tools(url)
        done = {"type": "tool_result", "tool_use_id": call.id, "content": "painted"}
        turns = [*ASKED, {"role": "assistant", "content": [call]}, {"role": "user", "content": [done]}]
        return _anthropic(url).create(model=MODEL, messages=turns, tools=[self.tool], max_tokens=8)

    def thinking(self, url: str) -> Any:
        thinking = {"type": "enabled", "budget_tokens": 6}
        asked = {"model": MODEL, "messages": ASKED, "max_tokens": 12, "thinking": thinking}
        said = _anthropic(url).create(**asked)
        with _anthropic(url).stream(**asked) as stream:
            streamed = stream.get_final_message()
        for one in (said, streamed):
            assert [block.type for block in one.content] == ["thinking", "text"]
        turns = [*ASKED, {"role": "assistant", "content": said.content}, *ASKED]
        return _anthropic(url).create(**{**asked, "messages": turns})


def _llama(url: str, **more: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    about = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", **{**about, "max_tokens": 64, **more})


class LlamaIndex:
    def picture(self, url: str) -> Any:
        from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

        blocks = [TextBlock(text="What colour?"), ImageBlock(image=base64.b64decode(PNG))]
        return _llama(url, max_tokens=8).chat([ChatMessage(role="user", blocks=blocks)])

    def stream(self, url: str) -> Any:
        return "".join(piece.delta or "" for piece in _llama(url, max_tokens=8).stream_complete("Hi"))

    def tools(self, url: str) -> Any:
        from llama_index.core.tools import FunctionTool

        llm = _llama(url)
        tool = FunctionTool.from_defaults(paint, fn_schema=Paint)
        said = llm.chat_with_tools([tool], "Paint it", tool_required=True)
        return Paint(**llm.get_tool_calls_from_response(said)[0].tool_kwargs), said

    def structured(self, url: str) -> Any:
        from llama_index.core.prompts import PromptTemplate

        return _llama(url).structured_predict(Paint, PromptTemplate("Paint it")).colour

    def sent_back(self, url: str) -> Any:
        from llama_index.core.llms import ChatMessage

        said = self.tools(url)[1].message
        calls = _llama(url).get_tool_calls_from_response(self.tools(url)[1])
        done = ChatMessage(role="tool", content="painted", additional_kwargs={"tool_call_id": calls[0].tool_id})
        return _llama(url, max_tokens=8).chat([ChatMessage(role="user", content="Paint it"), said, done])

    def thinking(self, url: str) -> Any:
        """The library keeps the content, and the server's answer beside it."""
        said = _llama(url, max_tokens=12, additional_kwargs={"extra_body": BUDGET}).complete("Hi")
        assert said.text and said.raw.choices[0].message.reasoning_content


#: Row → the package whose version it shows, and the client.
CLIENTS: dict[str, tuple[str, Any]] = {
    "openai": ("openai", OpenAIClient()),
    "LangChain": ("langchain-openai", LangChain()),
    "pydantic-ai": ("pydantic-ai-slim", PydanticAI("openai")),
    "openai-agents": ("openai-agents", OpenAIAgents()),
    "smolagents": ("smolagents", SmolAgents()),
    "instructor": ("instructor", Instructor()),
    "LiteLLM openai/": ("litellm", LiteLLM("openai")),
    "LiteLLM hosted_vllm/": ("litellm", LiteLLM("hosted_vllm")),
    "anthropic": ("anthropic", AnthropicClient()),
    "pydantic-ai, anthropic": ("anthropic", PydanticAI("anthropic")),
    "LlamaIndex": ("llama-index-llms-openai-like", LlamaIndex()),
}


def run_row(name: str, url: str, thinker: str) -> dict[str, str] | None:
    """The cells of a client: "ok", or the error; None where it is not installed."""
    package, client = CLIENTS[name]
    try:
        row = {"version": importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return None
    for cell in CELLS:
        try:
            getattr(client, cell.replace(" ", "_"))(thinker if cell == "thinking" else url)
            row[cell] = "ok"
        except Exception as error:  # noqa: BLE001 - the table shows it
            row[cell] = f"{type(error).__name__}: {error}"[:300]
    return row


def write_table(command: str, rows: dict[str, dict[str, str]], path: Path) -> None:
    """Write the rows as a table in Markdown."""
    lines = ["# Client libraries by feature", "", f"`{command}`, once in each environment.", ""]
    lines += [f"| client | version | {' | '.join(CELLS)} |", f"|---|---|{'---|' * len(CELLS)}"]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['version']} | {' | '.join(row[cell] for cell in CELLS)} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--thinker", required=True, help="URL of a model that thinks, for the cells of that name")
    parser.add_argument("--only", choices=CLIENTS, action="append")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    print(" | ".join(["client", "version", *CELLS]))
    rows: dict[str, dict[str, str]] = {}
    if args.output is not None and args.output.exists():
        rows = json.loads(args.output.read_text(encoding="utf-8"))["clients"]
    for name in args.only or CLIENTS:
        if (row := run_row(name, args.url, args.thinker)) is not None:
            rows[name] = row
            print(" | ".join([name, row["version"], *(row[cell][:60] for cell in CELLS)]), flush=True)
    if args.output is not None:
        command = f"python benchmarks/clients.py {args.url} --thinker {args.thinker} --output {args.output}"
        args.output.write_text(
            json.dumps({"command": command, "clients": rows}, indent=1) + "\n", encoding="utf-8"
        )
        write_table(command, rows, args.output.with_name("client-features.md"))


if __name__ == "__main__":
    main()
