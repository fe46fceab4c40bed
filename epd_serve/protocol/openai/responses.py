"""Translate ``POST /v1/responses`` to a chat completion and its answer back to a response.

Responses are not stored: clients send the whole conversation.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.chunks import Usage
from epd_serve.protocol.openai.fields import (
    WIRE_INTEGERS,
    Integer,
    MessageModel,
    NoEffect,
    RequestModel,
    broken_rule,
    explain,
)
from epd_serve.protocol.openai.generation import MAX_TOP_LOGPROBS, ChatCompletionRequest, CommonRequest
from epd_serve.protocol.openai.messages import MAX_MESSAGES, MAX_PARTS, MediaSource
from epd_serve.protocol.openai.tools import MAX_TOOLS, FunctionDefinition, FunctionName, NamedFunction, Schema
from epd_serve.protocol.wire import MediaRef, TokenizeReply, TokenizeRequest

LOGPROBS = "message.output_text.logprobs"
_encode = msgspec.json.Encoder().encode


class InputPart(MessageModel):
    """User text, text of an earlier answer, or an image."""

    type: Literal["input_text", "output_text", "reasoning_text", "input_image"] = Field(
        description="Kind of the part."
    )
    text: str | None = Field(None, description="A text.")
    image_url: str | None = Field(None, description="URL of an image.")
    detail: Literal["auto", "high", "low"] | None = Field(None, description="low: scale down to 512x512 pixels.")


Content = Annotated[
    list[InputPart],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True, description="A text, or a list of parts."),
    BeforeValidator(
        lambda content: [{"type": "input_text", "text": content}] if isinstance(content, str) else content,
        json_schema_input_type=str | list[InputPart],
    ),
]


_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(MessageModel):
    """A message, a function call or its output, or the reasoning of an earlier answer."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = Field(
        None, description="Kind of the item."
    )
    role: Literal["user", "assistant", "system", "developer"] | None = Field(None, description="Author.")
    content: Content | None = Field(None, description="Message content: a text, or a list of parts.")
    call_id: str | None = Field(None, description="Id of a function call, repeated in its output.")
    name: str | None = Field(None, description="Name of the called function.")
    arguments: str | None = Field(None, description="Function arguments: a JSON object as text.")
    output: Content | None = Field(None, description="Function output: a text, or a list of parts.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in _REQUIRED[self.type or "message"]:
            if getattr(self, name) is None:
                raise broken_rule(f"{name} is required", name, "missing_required_parameter")
        return self


class FunctionTool(FunctionDefinition):
    """Function that the model may call."""

    type: Literal["function"] = Field(description="All tools are functions.")


class FunctionChoice(NamedFunction):
    """Choice of one function to call."""

    type: Literal["function"] = Field(description="All tools are functions.")


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice


class TextFormat(RequestModel):
    """Structure of the answer. All fields but ``type`` require type "json_schema"."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Kind of structure.")
    name: FunctionName | None = Field(None, description="Name of the schema.")
    description: str | None = Field(None, description="Accepted and ignored.")
    schema_: Schema | None = Field(None, alias="schema", description="JSON Schema of the answer.")
    strict: bool | None = Field(None, description="Refuse a schema that cannot be enforced in full.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and (self.schema_ is None or self.name is None):
            raise broken_rule("type 'json_schema' needs name and schema", "schema")
        return self


class TextOptions(RequestModel):
    """Options of the answer's text."""

    format: TextFormat | None = Field(None, description="Structure of the answer.")
    verbosity: str | None = Field(None, description="Accepted and ignored.")


class Reasoning(MessageModel):
    """Options of reasoning models."""

    effort: str | None = Field(None, description="reasoning_effort for the chat template.")


class ResponsesNoEffect(NoEffect):
    """Unsupported options of responses."""

    previous_response_id: None = Field(None, description="Answers are not stored; send the whole conversation.")
    conversation: None = Field(None, description="Answers are not stored; send the whole conversation.")
    prompt: None = Field(None, description="Prompts are not stored; send instructions and input.")
    background: Literal[False] | None = Field(None, description="Answers are not stored for later retrieval.")
    truncation: Literal["disabled"] | None = Field(None, description="Prompts are never truncated.")
    max_tool_calls: None = Field(None, description="The client runs all tools.")


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesRequest(CommonRequest, ResponsesNoEffect):
    """Body of ``POST /v1/responses``."""

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, description="A text, or the conversation."),
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value,
            json_schema_input_type=str | list[InputItem],
        ),
    ]
    instructions: str | None = Field(None, description="The system message.")
    max_output_tokens: Integer | None = Field(None, ge=1, lt=WIRE_INTEGERS, description="Maximum tokens.")
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives per token.")
    include: list[Included] | None = Field(None, max_length=16, description="Additional parts of the answer.")
    text: TextOptions | None = Field(None, description="Options of the answer's text.")
    reasoning: Reasoning | None = Field(None, description="Options of reasoning models.")
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, description="Functions to call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether the model must call a function.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in an answer; default true.")

    def _check(self) -> None:
        if self.top_logprobs is not None and LOGPROBS not in (self.include or ()):
            raise InvalidRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")


class InputTokens(BaseModel):
    """Number of tokens of an input."""

    object: Literal["response.input_tokens"] = Field(description="Kind of the object.")
    input_tokens: int = Field(description="Number of input tokens.")


class TranslatedCall(ChatCompletionRequest):
    """Chat completion translated from another API's request.

    ``places`` names, for each chat message, the field of that request it comes from.
    """

    places: list[str]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Build the chat from its fields. Raises InvalidRequest that names the field of the original request."""
        try:
            return cls.model_validate(fields)
        except (ValidationError, InvalidRequest) as error:
            failure = explain(error, cls) if isinstance(error, ValidationError) else error
            failure.param = _place(failure.param, fields["places"])
            raise failure from error

    def media(self) -> list[MediaSource]:
        return [replace(source, param=_place(source.param, self.places) or "") for source in super().media()]

    def message(self, items: list[MediaRef]) -> TokenizeRequest:
        """Return the tokenize request that counts the input."""
        return TokenizeRequest(items=items, messages=self.chat(), prompting=self.prompting())

    def answer(self, reply: TokenizeReply, max_model_len: int) -> InputTokens:
        """Return the answer to :meth:`message`."""
        return InputTokens(object="response.input_tokens", input_tokens=len(reply.tokens))


class ResponsesCall(TranslatedCall):
    """The chat completion that a :class:`ResponsesRequest` translates to."""

    asked: ResponsesRequest

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        asked = ResponsesRequest.parse(body)
        messages, places = _messages(asked)
        return cls.of(
            {
                **asked.model_dump(include=_SAME_FIELDS),
                "asked": asked,
                "places": places,
                "messages": messages,
                "max_completion_tokens": asked.max_output_tokens,
                "logprobs": LOGPROBS in (asked.include or ()) or None,
                "tools": None if asked.tools is None else [_in_function(tool) for tool in asked.tools],
                "tool_choice": _in_function(asked.tool_choice),
                "response_format": _format(asked.text),
                "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
                "stream_options": {"include_usage": True} if asked.stream else None,
            }
        )

    def translation(self, *, id: str, created: int, model: str) -> ResponseBuilder:
        return ResponseBuilder(self.asked, id=id, created=created, model=model)


_SAME_FIELDS = {*CommonRequest.model_fields, "top_logprobs", "parallel_tool_calls"}


def _messages(asked: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chat messages, and for each the request field it comes from."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
        places.append("instructions")
    thought = ""
    for index, item in enumerate(asked.input):
        if item.type == "reasoning":
            thought += "".join(part.text or "" for part in item.content or ())
            continue
        if item.type == "function_call":
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
                places.append(f"input[{index}]")
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "content": _parts(item.output), "tool_call_id": item.call_id})
            places.append(f"input[{index}].output")
        else:
            messages.append({"role": item.role, "content": _parts(item.content)})
            places.append(f"input[{index}].content")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages, places


def _parts(parts: list[InputPart] | None) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": part.image_url and {"url": part.image_url, "detail": part.detail}}
        if part.type == "input_image"
        else {"type": "text", "text": part.text}
        for part in parts or ()
    ]


def _in_function(tool: FunctionTool | FunctionChoice | str | None) -> Any:
    """Convert a tool or tool choice to the chat API's form; strings stay as they are."""
    if isinstance(tool, str | None):
        return tool
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    asked = None if text is None else text.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        return {"type": asked.type}
    schema = asked.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _place(param: str | None, places: list[str]) -> str | None:
    """Convert the name of a chat field to the request's field."""
    found = re.match(r"messages\[(\d+)\](?:\.content)?(.*)", param or "")
    if found is not None:
        return places[int(found[1])] + found[2].removesuffix(".url")
    return param and param.replace("response_format.json_schema", "text.format")


class ResponseBuilder:
    """Turns a chat completion into a response or its stream events.

    Args:
        id: hex digits for the ids of the response and its items.
        created: seconds since the epoch.
    """

    content_type = b"application/json"

    def __init__(self, asked: ResponsesRequest, *, id: str, created: int, model: str) -> None:
        self._asked = asked
        self._id, self._created, self._model = id, created, model
        self._sent: list[bytes] = []
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None
        self._finish_reason = "stop"

    def whole(self, answer: bytes) -> bytes:
        """Return the response for a chat.completion."""
        body = msgspec.json.decode(answer)
        [choice] = body["choices"]
        self._usage, self._finish_reason = body["usage"], choice["finish_reason"]
        self._take(choice["message"], choice.get("logprobs"))
        self._close_item()
        return _encode(self._response())

    def events(self, data: bytes) -> bytes:
        """Return the events for a chat.completion.chunk, an error, or the end of the answer ("[DONE]")."""
        if not self._number:
            self._emit("response.created", response=self._response("in_progress"))
            self._emit("response.in_progress", response=self._response("in_progress"))
        chunk = None if data == b"[DONE]" else msgspec.json.decode(data)
        if chunk is None:
            self._close_item()
            response = self._response()
            self._emit(f"response.{response['status']}", response=response)
        elif "error" in chunk:
            error = {"code": chunk["error"].get("code") or "server_error", "message": chunk["error"]["message"]}
            self._emit("response.failed", response=self._response("failed", error))
            self._emit("error", **error, param=None, error=chunk["error"])
        else:
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk["choices"]:
                self._take(choice["delta"], choice.get("logprobs"))
                self._finish_reason = choice["finish_reason"] or self._finish_reason
        sent, self._sent = b"".join(self._sent), []
        return sent

    def _take(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            self._take_thought(thought)
        if text := delta.get("content"):
            self._take_text(text, (logprobs or {}).get("content") or [])
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if function.get("name"):
                self._close_item()
                about = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                self._open_item("fc", {"type": "function_call", **about})
            assert self._open is not None, "a call begins with its name"
            if function["arguments"]:
                self._open["arguments"] += function["arguments"]
                self._emit("response.function_call_arguments.delta", delta=function["arguments"], **self._place())

    def _take_thought(self, text: str) -> None:
        if self._open is None or self._open["type"] != "reasoning":
            self._close_item()
            item = self._open_item("rs", {"type": "reasoning", "summary": [], "content": []})
            item["content"].append({"type": "reasoning_text", "text": ""})
            self._emit("response.content_part.added", **self._place(), content_index=0, part=item["content"][0])
        assert self._open is not None
        self._open["content"][0]["text"] += text
        self._emit("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _take_text(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        if self._open is None or self._open["type"] != "message":
            if not text.strip() and self._open is None and self._output:
                return  # whitespace between two calls
            self._close_item()
            item = self._open_item("msg", {"type": "message", "role": "assistant", "content": []})
            item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            self._emit("response.content_part.added", **self._place(), content_index=0, part=item["content"][0])
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        self._emit("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

    def _open_item(self, prefix: str, about: dict[str, Any]) -> dict[str, Any]:
        item_id = f"{prefix}_{self._id}_{len(self._output)}"
        self._open = {"id": item_id, "status": "in_progress", **about}
        self._emit("response.output_item.added", output_index=len(self._output), item=self._open)
        return self._open

    def _close_item(self) -> None:
        item = self._open
        if item is None:
            return
        if item["type"] != "function_call":
            part, place = item["content"][0], {**self._place(), "content_index": 0}
            about = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit(f"response.{part['type']}.done", **place, **about)
            self._emit("response.content_part.done", **place, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._emit("response.function_call_arguments.done", **self._place(), **done)
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        self._emit("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _emit(self, name: str, /, **fields: Any) -> None:
        data = _encode({"type": name, "sequence_number": self._number, **fields})
        self._sent.append(b"event: %b\ndata: %b\n\n" % (name.encode(), data))
        self._number += 1

    def _response(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response object; without ``status``, that of the complete answer."""
        asked, usage, is_cut = self._asked, self._usage, self._finish_reason == "length"
        named = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
        echoed = ("instructions", "max_output_tokens", "prompt_cache_key", "safety_identifier", "user")
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if is_cut else "completed"),
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut and not status else None,
            "model": self._model,
            "output": self._output,
            **{name: getattr(asked, name) for name in (*echoed, "max_tool_calls", "previous_response_id")},
            "background": False,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **named.get("text", {})},
            "tool_choice": named.get("tool_choice", "auto"),
            "tools": [{"strict": True, "parameters": {}, **tool} for tool in named.get("tools", [])],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
        }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    counts = Usage.of(usage)
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
