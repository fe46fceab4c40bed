"""Body of ``POST /v1/responses``, checked field by field, and the chat that it asks for.

Nothing is stored, so ``store`` and ``previous_response_id`` are refused by name: a client sends the conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.answers import InputTokens
from epd_serve.protocol.openai.fields import (
    RESPONSES_NEUTRAL,
    WIRE_INTEGERS,
    CacheSalt,
    Integer,
    MessageModel,
    RequestModel,
    drop_neutral,
    explain,
)
from epd_serve.protocol.openai.generation import MAX_TOP_LOGPROBS, ChatCompletionRequest, StreamOptions
from epd_serve.protocol.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    FunctionCall,
    ImageUrl,
    MediaSource,
    Message,
    ToolCall,
    too_many_parts,
)
from epd_serve.protocol.openai.messages import ContentPart as ChatPart
from epd_serve.protocol.openai.strict_json import decode_object
from epd_serve.protocol.openai.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Schema,
    Tool,
)
from epd_serve.protocol.wire import MediaRef, TokenizeReply, TokenizeRequest

LOGPROBS = "message.output_text.logprobs"


def _without_nulls(item: Any) -> Any:
    """A null means that the field is absent. Client libraries write every field that they know of an earlier
    answer's items so, and know more of them with each release."""
    if not isinstance(item, dict) or None not in item.values():
        return item
    return {name: value for name, value in item.items() if value is not None}


class InputPart(MessageModel):
    """A piece of text (of the user's or an earlier answer's) or a picture by URL."""

    drop_nulls = model_validator(mode="before")(_without_nulls)

    type: Literal["input_text", "output_text", "input_image"]
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "high", "low"] | None = None
    file_id: None = None


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Content = Annotated[
    Annotated[list[InputPart], Field(fail_fast=True)],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart]),
    Field(min_length=1, max_length=MAX_PARTS),
]


class InputItem(MessageModel):
    """One turn: a message (``role`` and ``content``), a "function_call" of an earlier answer (``call_id``,
    ``name``, ``arguments``) or its "function_call_output" (``call_id``, ``output``). ``id`` and ``status`` are
    labels."""

    drop_nulls = model_validator(mode="before")(_without_nulls)

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def check(self, place: str) -> None:
        """Each type has its own fields. Raises InvalidRequest."""
        wanted = _ITEM_FIELDS[self.type]
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            if (getattr(self, name) is None) == (name in wanted):
                problem = f"needs {', '.join(wanted)}" if name in wanted else f"has no {name}"
                raise InvalidRequest(f"{place}: an item of type {self.type!r} {problem}", param=f"{place}.{name}")


_ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionChoice(RequestModel):
    type: Literal["function"]
    name: FunctionName


class TextFormat(RequestModel):
    """``name``, ``schema``, ``strict`` and ``description`` go with type "json_schema"."""

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(MessageModel):
    effort: str | None = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(RequestModel):
    """Body of ``POST /v1/responses``. Null means: as if the field were absent."""

    model: str | None = None
    input: Annotated[
        Annotated[list[InputItem], Field(fail_fast=True)],
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    max_output_tokens: Integer | None = Field(None, ge=1, lt=WIRE_INTEGERS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    seed: Integer | None = Field(None, ge=-WIRE_INTEGERS, lt=WIRE_INTEGERS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, max_length=16
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Integer | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: CacheSalt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def parse(cls, body: bytes | bytearray) -> ResponsesCall:
        """Body → checked request, with the chat that it asks for. Raises InvalidRequest with ``param`` set."""
        fields = decode_object(body)
        try:
            request = cls.model_validate(drop_neutral(fields, RESPONSES_NEUTRAL))
        except ValidationError as error:
            raise explain(error, cls, RESPONSES_NEUTRAL) from error
        return ResponsesCall.of(request)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Rules that join several fields. Raises InvalidRequest."""
        num_parts = sum(len(item.content or ()) + len(item.output or ()) for item in self.input)
        if num_parts > MAX_PARTS:
            raise too_many_parts(num_parts, "input")
        for index, item in enumerate(self.input):
            item.check(f"input[{index}]")
            for field in ("content", "output"):
                for number, part in enumerate(getattr(item, field) or ()):
                    _check_part(part, f"input[{index}].{field}[{number}]")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")


def _check_part(part: InputPart, place: str) -> None:
    wanted, other = ("image_url", "text") if part.type == "input_image" else ("text", "image_url")
    if getattr(part, wanted) is None or getattr(part, other) is not None:
        raise InvalidRequest(
            f"{place}: a part of type {part.type!r} needs exactly the field {wanted!r}", param=f"{place}.{wanted}"
        )


class ResponsesCall(ChatCompletionRequest):
    """The chat of a :class:`ResponsesRequest`, which it keeps as ``asked``."""

    asked: ResponsesRequest
    sources: list[Any]

    @classmethod
    def of(cls, asked: ResponsesRequest) -> Self:
        """Raises InvalidRequest for contradictions."""
        asked.check()
        messages, sources = _messages(asked)
        try:
            request = cls.model_validate(
                {
                    "asked": asked,
                    "sources": sources,
                    "model": asked.model,
                    "messages": messages,
                    "max_completion_tokens": asked.max_output_tokens,
                    "temperature": asked.temperature,
                    "top_p": asked.top_p,
                    "seed": asked.seed,
                    "logprobs": True if asked.wants_logprobs else None,
                    "top_logprobs": asked.top_logprobs,
                    "tools": _tools(asked.tools),
                    "tool_choice": _choice(asked.tool_choice),
                    "parallel_tool_calls": asked.parallel_tool_calls,
                    "response_format": _format(asked.text),
                    "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
                    "priority": asked.priority,
                    "cache_salt": asked.cache_salt,
                    "stream": asked.stream,
                    "stream_options": StreamOptions(include_usage=True) if asked.stream else None,
                }
            )
        except ValidationError as error:
            raise explain(error, cls) from error
        try:
            request._check()
            request.grammar()
        except InvalidRequest as error:
            error.param = (error.param or "").replace("response_format.json_schema", "text.format") or None
            error.param = (error.param or "").replace("messages[", "input[") or None
            raise
        return request

    def media(self) -> list[MediaSource]:
        return self.sources


class InputTokensCall:
    """The same body as ``/v1/responses`` has, asked for its length alone
    (:class:`epd_serve.protocol.openai.tokenizing.TokenQuestion`)."""

    def __init__(self, call: ResponsesCall) -> None:
        self.model = call.model
        self._call = call

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        """Raises InvalidRequest with ``param`` set."""
        return cls(ResponsesRequest.parse(body))

    def media(self) -> list[MediaSource]:
        return self._call.media()

    def message(self, items: list[MediaRef]) -> TokenizeRequest:
        return TokenizeRequest(items=items, messages=self._call.chat(), prompting=self._call.prompting())

    def answer(self, reply: TokenizeReply, max_model_len: int) -> InputTokens:
        return InputTokens(object="response.input_tokens", input_tokens=len(reply.tokens))


def _messages(asked: ResponsesRequest) -> tuple[list[Message], list[MediaSource]]:
    messages: list[Message] = []
    sources: list[MediaSource] = []
    if asked.instructions is not None:
        messages.append(_message("system", [ChatPart(type="text", text=asked.instructions)]))
    for index, item in enumerate(asked.input):
        if item.type == "function_call":
            call = ToolCall(
                id=item.call_id or "",
                function=FunctionCall(name=item.name or "", arguments=item.arguments or "{}"),
            )
            if messages and messages[-1].role == "assistant":
                last = messages.pop()
                messages.append(last.model_copy(update={"tool_calls": [*(last.tool_calls or []), call]}))
            else:
                messages.append(Message.model_construct(role="assistant", content=None, tool_calls=[call]))
            continue
        field = "content" if item.type == "message" else "output"
        parts: list[ChatPart] = []
        for number, part in enumerate(getattr(item, field)):
            if part.image_url is None:
                parts.append(ChatPart(type="text", text=part.text))
                continue
            parts.append(ChatPart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail)))
            param = f"input[{index}].{field}[{number}].image_url"
            sources.append(MediaSource(url=part.image_url, param=param, low_detail=part.detail == "low"))
        messages.append(_message(item.role or "tool", parts, item.call_id))
    return messages, sources


def _message(role: Any, parts: list[ChatPart], call_id: str | None = None) -> Message:
    return Message.model_construct(role=role, content=parts, tool_calls=None, tool_call_id=call_id)


def _tools(tools: list[FunctionTool] | None) -> list[Tool] | None:
    if tools is None:
        return None
    return [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in tools
    ]


def _choice(choice: Any) -> Any:
    if not isinstance(choice, FunctionChoice):
        return choice
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _format(text: TextOptions | None) -> ResponseFormat | None:
    asked = None if text is None else text.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        if asked.schema_ is not None or asked.name is not None:
            raise InvalidRequest("text.format: name and schema go with type 'json_schema'", param="text.format")
        return ResponseFormat(type=asked.type)
    if asked.schema_ is None or asked.name is None:
        raise InvalidRequest("text.format: type 'json_schema' needs name and schema", param="text.format.schema")
    schema = JsonSchema.model_construct(
        name=asked.name, description=asked.description, schema_=asked.schema_, strict=asked.strict
    )
    return ResponseFormat(type="json_schema", json_schema=schema)
