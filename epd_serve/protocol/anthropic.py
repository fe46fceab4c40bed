"""Translate Anthropic's ``POST /v1/messages`` to a chat completion and its answer back to a message.

https://docs.anthropic.com/en/api/messages. The client runs all tools; Anthropic's server tools are not supported.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec.structs import replace
from pydantic import Field, model_validator

from epd_serve.protocol.openai import fields
from epd_serve.protocol.openai.chunks import Usage
from epd_serve.protocol.openai.fields import MessageModel, text_or
from epd_serve.protocol.openai.generation import NumTokens, Tokens, TokensOrNone
from epd_serve.protocol.openai.messages import MAX_MESSAGES, MAX_PARTS
from epd_serve.protocol.openai.tool_format import is_object
from epd_serve.protocol.openai.tools import MAX_TOOLS, FunctionName, Schema
from epd_serve.protocol.openai.translated import AnswerTranslation, TranslatedChat, encode
from epd_serve.protocol.wire import PromptOptions

Kind = Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
#: Required fields of block types whose field is not named after the type.
_NEEDED = {"image": ["source"], "tool_use": ["id", "name", "input"], "tool_result": ["tool_use_id"]}


class Block(MessageModel):
    """One content block of a message."""

    type: Kind = Field(description="Kind of the block.")
    text: str | None = Field(None, description="A text.")
    source: dict[str, Any] | None = Field(None, description="An image: media_type and data in base64, or url.")
    id: str | None = Field(None, description="Id of a tool call.")
    name: str | None = Field(None, description="Name of the called tool.")
    input: dict[str, Any] | None = Field(None, description="Arguments of a tool call.")
    tool_use_id: str | None = Field(None, description="Id of the call that a tool result answers.")
    content: Blocks | None = Field(None, description="Tool result: a text, or texts and images.")
    thinking: str | None = Field(None, description="The model's earlier reasoning.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in _NEEDED.get(self.type, [self.type.removeprefix("redacted_")]):
            if getattr(self, field) is None and self.type != "redacted_thinking":
                raise fields.broken_rule(f"{field} is required", field, "missing_required_parameter")
        return self


Blocks = Annotated[
    list[Block],
    Field(max_length=MAX_PARTS, fail_fast=True, description="A text, or a list of blocks."),
    text_or(list[Any], lambda text: [{"type": "text", "text": text}]),
]


class Turn(MessageModel):
    role: Literal["user", "assistant", "system"] = Field(description="Author of the message.")
    content: Blocks


class ClientTool(MessageModel):
    type: Literal["custom"] | None = Field(None, description="Anthropic's server tools are not supported.")
    name: FunctionName
    description: str | None = Field(None, description="Description of the tool, for the model.")
    input_schema: Schema = Field(description="JSON Schema of the input, an object.")
    strict: bool | None = Field(None, description="Refuse a schema that cannot be enforced in full.")

    def function(self) -> dict[str, Any]:
        """Return the tool in the chat API's form."""
        about = self.model_dump(include={"name", "description", "strict"})
        return {"type": "function", "function": {**about, "parameters": self.input_schema}}


class ClientToolChoice(MessageModel):
    type: Literal["auto", "any", "tool", "none"] = Field(description="Whether the model must call a tool.")
    name: str | None = Field(None, description="Name of the tool to call.")
    disable_parallel_tool_use: bool | None = Field(None, description="Allow at most one call per answer.")


class ThinkingConfig(MessageModel):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="Whether the model thinks.")
    budget_tokens: TokensOrNone | None = Field(None, description="Most thinking tokens.")


class OutputConfig(MessageModel):
    effort: str | None = Field(None, description="reasoning_effort for the chat template.")
    format: dict[str, Any] | None = Field(None, description="Output format; the answer follows its schema.")


class CountTokensRequest(fields.Body, fields.Labels):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: str | None = Field(None, description="Name of the model.")
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="The chat.")
    system: Blocks | None = Field(None, description="The system message.")
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS, description="Tools the model may call.")
    tool_choice: ClientToolChoice | None = Field(None, description="Whether the model must call a tool.")
    thinking: ThinkingConfig | None = Field(None, description="Thinking; off if absent.")
    output_config: OutputConfig | None = Field(None, description="Structure of the answer, and effort.")
    cache_control: Any = Field(None, description="Accepted and ignored.")
    context_management: Any = Field(None, description="Accepted and ignored.")
    service_tier: Any = Field(None, description="Accepted and ignored.")


class MessagesRequest(CountTokensRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: Tokens = Field(description="Maximum tokens of the answer.")
    stop_sequences: fields.StopStrings | None = Field(None, description="Strings that stop the answer.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling: probability mass to keep.")
    top_k: NumTokens | None = Field(None, description="Sample among this many top tokens.")


class MessagesCall(TranslatedChat):
    """The chat completion that a request translates to."""

    body: ClassVar[type[CountTokensRequest]] = MessagesRequest
    format_field: ClassVar[str] = "output_config.format"

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        asked = cls.body.parse(body)
        messages, places = _messages(asked)
        choice, thinking, config = asked.tool_choice, asked.thinking, asked.output_config
        thinks = thinking is not None and thinking.type != "disabled"
        named = {"type": "function", "function": {"name": choice and choice.name}}
        chat: dict[str, Any] = {
            "model": asked.model,
            "places": places,
            "messages": messages,
            "tools": [tool.function() for tool in asked.tools or ()] or None,
            "tool_choice": choice and {"any": "required", "tool": named}.get(choice.type, choice.type),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": {"enable_thinking": thinks},
            "thinking_token_budget": thinking.budget_tokens if thinking and thinks else None,
            "reasoning_effort": config and config.effort,
        }
        if config is not None and config.format is not None:
            schema = {"name": "answer", "schema": config.format.get("schema")}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(asked, MessagesRequest):
            chat |= asked.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"})
            usage = {"include_usage": True, "continuous_usage_stats": True}
            chat |= {"stop": asked.stop_sequences, "stream_options": usage if asked.stream else None}
        return cls.of(chat)

    def prompting(self) -> PromptOptions:
        return replace(super().prompting(), bounds_answer=True)  # clients send the max_tokens of larger models

    def translation(self, *, id: str, created: int, model: str) -> MessageBuilder:
        return MessageBuilder(id=id, model=model)


class CountTokensCall(MessagesCall):
    body: ClassVar[type[CountTokensRequest]] = CountTokensRequest


def _messages(asked: CountTokensRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chat messages, and for each the request field it comes from."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if asked.system:
        messages.append({"role": "system", "content": _parts(asked.system)})
        places.append("system")
    for index, turn in enumerate(asked.messages):
        first = len(messages)
        for block in turn.content:
            if block.type == "tool_result":
                about = {"role": "tool", "tool_call_id": block.tool_use_id}
                messages.append({**about, "content": _parts(block.content or []) or ""})
        parts = _parts(turn.content)
        thought = "\n".join(block.thinking for block in turn.content if block.thinking) or None
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": encode(block.input).decode()}}
            for block in turn.content
            if block.type == "tool_use"
        ]
        if parts or calls or thought or first == len(messages):
            said = {"content": parts or (None if calls else ""), "tool_calls": calls or None}
            messages.append({"role": turn.role, "reasoning_content": thought, **said})
        places += [f"messages[{index}].content"] * (len(messages) - first)
    return messages, places


def _parts(blocks: list[Block]) -> list[dict[str, Any]]:
    """Return text and image blocks as parts of a chat message."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.type == "text":
            parts.append({"type": "text", "text": block.text})
        elif (source := block.source) is not None:
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


class MessageBuilder(AnswerTranslation):
    """Builds a message, or its stream events."""

    def __init__(self, *, id: str, model: str) -> None:
        super().__init__()
        self._about = {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}
        self._content: list[dict[str, Any]] = []  # the last block is the open one
        self._arguments = ""  # of the open call

    def _emit_begin(self) -> None:
        self._emit("message_start", message=self._answer())

    def _open_item(self, call: dict[str, Any]) -> None:
        self._arguments = ""
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self._open == "thought":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif self._open == "call":
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        self._emit("content_block_start", index=len(self._content), content_block=block)
        self._content.append(block)

    def _extend(self, text: str, logprobs: Any = ()) -> None:
        if self._open == "call":
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            field = "thinking" if self._open == "thought" else "text"
            self._content[-1][field] += text
            delta = {"type": f"{field}_delta", field: text}
        self._emit("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close_item(self) -> None:
        if self._open == "call" and is_object(self._arguments):  # a truncated call keeps an empty input
            self._content[-1]["input"] = msgspec.json.decode(self._arguments)
        self._emit("content_block_stop", index=len(self._content) - 1)

    def _emit_end(self) -> None:
        answer = self._answer()
        delta = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        self._emit("message_delta", delta=delta, usage=answer["usage"])
        self._emit("message_stop")

    def _answer(self) -> dict[str, Any]:
        """Return the message; ``input_tokens`` excludes cached tokens."""
        usage = self._usage or Usage(0, 0)
        reason = "stop_sequence" if self._stop_reason else _STOP_REASONS.get(self._finish_reason or "")
        return {
            **self._about,
            "content": self._content,
            "stop_reason": reason,
            "stop_sequence": self._stop_reason,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_read_input_tokens": usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            },
        }
