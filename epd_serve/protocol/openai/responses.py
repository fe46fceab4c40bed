"""Translate ``POST /v1/responses`` to a chat completion and its answer back to a response.

Responses are not stored: clients send the whole conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import MessageModel, NoEffect, RequestModel, broken_rule, text_or
from epd_serve.protocol.openai.generation import CommonRequest, NumTop, Tokens
from epd_serve.protocol.openai.messages import MAX_MESSAGES, MAX_PARTS
from epd_serve.protocol.openai.tools import MAX_TOOLS, FunctionDefinition, FunctionName, NamedFunction, Schema
from epd_serve.protocol.openai.translated import AnswerTranslation, TranslatedChat

LOGPROBS = "message.output_text.logprobs"


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
    text_or(list[InputPart], lambda text: [{"type": "input_text", "text": text}]),
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
        if self.type == "json_schema" and None in (self.name, self.schema_):
            missing = "name" if self.name is None else "schema"
            raise broken_rule("type 'json_schema' needs name and schema", missing)
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
        text_or(list[InputItem], lambda text: [{"role": "user", "content": text}]),
    ]
    instructions: str | None = Field(None, description="The system message.")
    max_output_tokens: Tokens | None = Field(None, description="Maximum tokens.")
    top_logprobs: NumTop | None = Field(None, description="Alternatives per token.")
    include: list[Included] | None = Field(None, max_length=16, description="Additional parts of the answer.")
    text: TextOptions | None = Field(None, description="Options of the answer's text.")
    reasoning: Reasoning | None = Field(None, description="Options of reasoning models.")
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, description="Functions to call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether the model must call a function.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in an answer; default true.")

    def _check(self) -> None:
        if self.top_logprobs is not None and LOGPROBS not in (self.include or ()):
            raise InvalidRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")


class ResponsesCall(TranslatedChat):
    """The chat completion that a :class:`ResponsesRequest` translates to."""

    format_field: ClassVar[str] = "text.format"

    asked: ResponsesRequest

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        asked = ResponsesRequest.parse(body)
        messages, places = _messages(asked)
        form: dict[str, Any] | None = None
        if asked.text is not None and (wanted := asked.text.format) is not None:
            form = {"type": wanted.type}
            if wanted.type == "json_schema":
                form["json_schema"] = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
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
                "response_format": form,
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


class ResponseBuilder(AnswerTranslation):
    """Builds a response, or its stream events.

    Args:
        id: hex digits for the ids of the response and its items.
        created: seconds since the epoch.
    """

    def __init__(self, asked: ResponsesRequest, *, id: str, created: int, model: str) -> None:
        super().__init__()
        self._asked, self._id, self._created, self._model = asked, id, created, model
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}  # the open item
        self._number = 0

    def _emit(self, name: str, /, **fields: Any) -> None:
        super()._emit(name, sequence_number=self._number, **fields)
        self._number += 1

    def _emit_item(self, name: str, /, **fields: Any) -> None:
        """Emit an event about the open item."""
        place = {"item_id": self._item["id"], "output_index": len(self._output)}
        if self._open != "call":
            place["content_index"] = 0
        self._emit(f"response.{name}", **place, **fields)

    def _emit_begin(self) -> None:
        self._emit("response.created", response=self._answer("in_progress"))
        self._emit("response.in_progress", response=self._answer("in_progress"))

    def _open_item(self, call: dict[str, Any]) -> None:
        part: dict[str, Any] | None = None
        if self._open == "call":
            prefix, item = "fc", {"type": "function_call", "call_id": call["id"]}
            item |= {"name": call["function"]["name"], "arguments": ""}
        elif self._open == "thought":
            part = {"type": "reasoning_text", "text": ""}
            prefix, item = "rs", {"type": "reasoning", "summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            prefix, item = "msg", {"type": "message", "role": "assistant", "content": []}
        self._item = {"id": f"{prefix}_{self._id}_{len(self._output)}", "status": "in_progress", **item}
        self._emit("response.output_item.added", output_index=len(self._output), item=self._item)
        if part is not None:
            self._item["content"].append(part)
            self._emit_item("content_part.added", part=part)

    def _extend(self, text: str, logprobs: Any = ()) -> None:
        if self._open == "call":
            self._item["arguments"] += text
            self._emit_item("function_call_arguments.delta", delta=text)
            return
        [part] = self._item["content"]
        part["text"] += text
        if self._open == "thought":
            self._emit_item("reasoning_text.delta", delta=text)
        else:
            part["logprobs"] += logprobs
            self._emit_item("output_text.delta", delta=text, logprobs=logprobs)

    def _close_item(self) -> None:
        item = self._item
        if self._open == "call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_item("function_call_arguments.done", **done)
        else:
            [part] = item["content"]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit_item(f"{part['type']}.done", **done)
            self._emit_item("content_part.done", part=part)
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        self._emit("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _emit_end(self) -> None:
        response = self._answer()
        self._emit(f"response.{response['status']}", response=response)

    def _emit_error(self, error: dict[str, Any]) -> None:
        if not self._has_begun:  # clients expect response.created first
            self._emit_begin()
        about = {"code": error.get("code") or "server_error", "message": error["message"]}
        self._emit("response.failed", response=self._answer("failed", about))
        self._emit("error", **about, param=None, error=error)

    def _answer(self, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
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
            "usage": usage
            and {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }
