"""An answer of a chat as the objects and events of ``/v1/responses``.

The events of a text come in this order, each with a ``sequence_number``::

    response.created, response.in_progress
    response.output_item.added, response.content_part.added
    response.output_text.delta ...
    response.output_text.done, response.content_part.done, response.output_item.done
    response.completed (or response.incomplete, where max_output_tokens ended it)

A function call has ``response.function_call_arguments.delta ...`` and ``.done`` between its item's two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from epd_serve.protocol.openai.responses import ResponsesRequest

_encode = msgspec.json.Encoder().encode

Event = tuple[str, dict[str, Any]]


def event_bytes(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event with its name."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def response_object(
    asked: ResponsesRequest,
    *,
    id: str,
    created: int,
    model: str,
    status: str,
    output: list[dict[str, Any]],
    usage: dict[str, Any] | None,
    reason: str | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A response in the state ``status``; ``reason`` says why it is incomplete."""
    named = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "model": model,
        "output": output,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": named.get("text", {}).get("format", {"type": "text"}), "verbosity": "medium"},
        "tool_choice": named.get("tool_choice", "auto"),
        "tools": [{"strict": True, "parameters": {}, **tool} for tool in named.get("tools", [])],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": asked.user,
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


class ResponseBuilder:
    """Takes a chat's answer, streamed or whole, and gives what the response says of it.

    Args:
        id: hex, that the ids of the response and its items are made of.
        created: seconds since the epoch.
    """

    def __init__(self, asked: ResponsesRequest, *, id: str, created: int, model: str) -> None:
        self._asked = asked
        self._id = id
        self._created = created
        self._model = model
        self._sequence_number = -1
        self._output: list[dict[str, Any]] = []
        self._usage: dict[str, Any] | None = None
        self._finish_reason = "stop"
        self._open: dict[str, Any] | None = None
        self._has_begun = False

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The response of a chat.completion."""
        [choice] = answer["choices"]
        message = choice["message"]
        for _ in self._deltas(message, choice.get("logprobs")):
            pass
        self._usage, self._finish_reason = answer["usage"], choice["finish_reason"]
        for _ in self._close_item():
            pass
        return self._response()

    def feed(self, chunk: dict[str, Any]) -> list[Event]:
        """The events of one chat.completion.chunk."""
        events = list(self._begin())
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            events += self._deltas(choice["delta"], choice.get("logprobs"))
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        return events

    def end(self) -> list[Event]:
        """The events behind the last chunk."""
        events = [*self._begin(), *self._close_item()]
        response = self._response()
        events.append(self._event(f"response.{response['status']}", response=response))
        return events

    def failed(self, error: dict[str, Any]) -> list[Event]:
        """The events of an answer that broke off; ``error`` is the error object."""
        events = list(self._begin())
        code = error.get("code") or "server_error"
        response = self._object("failed", error={"code": code, "message": error["message"]})
        events.append(self._event("response.failed", response=response))
        events.append(self._event("error", **{**error, "code": code, "type": "error"}, error=error))
        return events

    def _begin(self) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield self._event("response.created", response=self._object("in_progress"))
            yield self._event("response.in_progress", response=self._object("in_progress"))

    def _deltas(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> Iterator[Event]:
        if delta.get("content"):
            yield from self._text(delta["content"], (logprobs or {}).get("content") or [])
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            if not text.strip() and self._open is None and self._output:
                return  # blanks between two calls
            yield from self._close_item()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": self._item_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
            yield from self._open_item({**item, "content": []})
            assert self._open is not None
            self._open["content"].append(part)
            yield self._event("response.content_part.added", **self._place(content=True), part=dict(part))
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", **self._place(content=True), delta=text, logprobs=logprobs)

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if function.get("name"):
            yield from self._close_item()
            yield from self._open_item(
                {
                    "id": self._item_id("fc"),
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call["id"],
                    "name": function["name"],
                    "arguments": "",
                }
            )
        assert self._open is not None, "a call begins with its name"
        if function["arguments"]:
            self._open["arguments"] += function["arguments"]
            yield self._event(
                "response.function_call_arguments.delta", **self._place(), delta=function["arguments"]
            )

    def _open_item(self, item: dict[str, Any]) -> Iterator[Event]:
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output), item=_copy(item))

    def _close_item(self) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._place(content=True), **text)
            yield self._event("response.content_part.done", **self._place(content=True), part=_copy(part))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **done)
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        yield self._event("response.output_item.done", output_index=len(self._output), item=_copy(item))
        self._output.append(item)
        self._open = None

    def _response(self) -> dict[str, Any]:
        if self._finish_reason == "length":
            return self._object("incomplete", reason="max_output_tokens")
        return self._object("completed")

    def _object(
        self, status: str, *, reason: str | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return response_object(
            self._asked,
            id=f"resp_{self._id}",
            created=self._created,
            model=self._model,
            status=status,
            output=[_copy(item) for item in self._output],
            usage=self._usage,
            reason=reason,
            error=error,
        )

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._id}_{len(self._output)}"

    def _place(self, *, content: bool = False) -> dict[str, Any]:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        return {**place, "content_index": 0} if content else place

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._sequence_number += 1
        return name, {"type": name, "sequence_number": self._sequence_number, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Copy an item as far as it grows: an event that was sent must not grow with it."""
    copy = dict(item)
    if "content" in copy:
        copy["content"] = [dict(part) for part in copy["content"]]
    if "logprobs" in copy:
        copy["logprobs"] = list(copy["logprobs"])
    return copy
