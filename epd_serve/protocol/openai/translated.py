"""Serve another API as chat completions: translate its request to a chat, and the chat's answer back."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, Field, ValidationError

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.chunks import Usage
from epd_serve.protocol.openai.fields import explain
from epd_serve.protocol.openai.generation import ChatCompletionRequest
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import MediaRef, TokenizeRequest
from epd_serve.types import Grammar

Kind = Literal["thought", "text", "call"]
encode = msgspec.json.Encoder().encode


class InputTokens(BaseModel):
    """Number of tokens of an input."""

    object: Literal["response.input_tokens"] = Field(description="Kind of the object.")
    input_tokens: int = Field(description="Number of input tokens.")


class TranslatedChat(ChatCompletionRequest):
    """A chat completion translated from another API's request.

    ``places`` names, for each chat message, the field of that request it comes from; ``format_field`` is the one
    that ``response_format`` comes from.
    """

    format_field: ClassVar[str] = "response_format"

    places: list[str]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Build the chat from its fields. Raises InvalidRequest that names the field of the original request."""
        try:
            return cls.model_validate(fields)
        except (ValidationError, InvalidRequest) as error:
            failure = explain(error, cls) if isinstance(error, ValidationError) else error
            param = cls._field(failure.param, fields["places"])
            failure.message = failure.message.replace(failure.param or "", param or "")
            failure.param = param
            raise failure from error

    def media(self) -> list[MediaSource]:
        return [replace(one, param=self._field(one.param, self.places) or "") for one in super().media()]

    def grammar(self) -> Grammar | None:
        grammar = super().grammar()
        return grammar and replace(grammar, param=self._field(grammar.param, self.places) or "")

    def message(self, items: list[MediaRef]) -> TokenizeRequest:
        """Return the tokenize request that counts the input."""
        return TokenizeRequest(items=items, messages=self.chat(), prompting=self.prompting())

    def answer(self, reply: Any, max_model_len: int) -> InputTokens:
        """Return the answer to :meth:`message`."""
        return InputTokens(object="response.input_tokens", input_tokens=len(reply.tokens))

    @classmethod
    def _field(cls, param: str | None, places: list[str]) -> str | None:
        """Convert the name of a chat field to the request's field."""
        found = re.match(r"messages\[(\d+)\](?:\.content)?(.*)", param or "")
        if found is not None:
            return places[int(found[1])] + found[2].removesuffix(".url")
        return param and re.sub(r"^response_format(\.json_schema)?", cls.format_field, param)

    @abstractmethod
    def translation(self, *, id: str, created: int, model: str) -> AnswerTranslation:
        """Return the translation of the answer; ``created`` is in seconds since the epoch."""


class AnswerTranslation:
    """Translates a chat's answer, whole or as stream events, to an API whose answers are lists of items.

    An item is a thought, a text or a call. A subclass keeps the items and emits the events of its API.
    ``content_type`` applies to non-streamed answers.
    """

    content_type = b"application/json"

    def __init__(self) -> None:
        self._open: Kind | None = None  # kind of the item that may still grow
        self._has_begun = False
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self._stop_reason: str | None = None  # the stop string that ended the text
        self._events: list[bytes] = []

    def whole(self, answer: bytes) -> bytes:
        """Return the answer for a chat.completion."""
        self._read(msgspec.json.decode(answer), "message")
        self._close()
        return encode(self._answer())

    def events(self, data: bytes) -> bytes:
        """Return the events for a chat.completion.chunk, an error, or the end of the answer ("[DONE]")."""
        if data == b"[DONE]":
            self._close()
            self._emit_end()
        elif "error" in (chunk := msgspec.json.decode(data)):
            self._emit_error(chunk["error"])
        else:
            self._read(chunk, "delta")
        sent, self._events = b"".join(self._events), []
        return sent

    def _read(self, body: dict[str, Any], field: Literal["message", "delta"]) -> None:
        if usage := body.get("usage"):
            self._usage = Usage.of(usage)
        if field == "delta" and not self._has_begun:
            self._has_begun = True
            self._emit_begin()
        for choice in body["choices"]:
            delta, logprobs = choice[field], choice.get("logprobs") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                self._begin_item("thought")
                self._extend(thought)
            if (text := delta.get("content")) and (text.strip() or self._open != "call"):
                self._begin_item("text")
                self._extend(text, logprobs.get("content") or ())
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                if function.get("name"):
                    self._begin_item("call", call)
                if function["arguments"]:
                    self._extend(function["arguments"])
            if choice["finish_reason"]:
                self._finish_reason = choice["finish_reason"]
                stop = choice.get("stop_reason")  # vLLM's is a number for a stop token
                self._stop_reason = stop if isinstance(stop, str) else None

    def _begin_item(self, kind: Kind, call: dict[str, Any] | None = None) -> None:
        """Begin an item, unless the open one is a thought or a text of this kind."""
        if kind == "call" or self._open != kind:
            self._close()
            self._open = kind
            self._open_item(call or {})

    def _close(self) -> None:
        if self._open is not None:
            self._close_item()
            self._open = None

    def _emit(self, name: str, /, **fields: Any) -> None:
        self._events.append(b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields})))

    def _emit_begin(self) -> None:
        """Emit the events before the first item."""

    def _open_item(self, call: dict[str, Any]) -> None:
        """Begin an item of the kind ``_open``; ``call`` has the id and the function of a call."""

    def _extend(self, text: str, logprobs: Any = ()) -> None:
        """Append to the open item's thought, text or arguments; ``logprobs`` are a text's tokens."""
        raise NotImplementedError

    def _close_item(self) -> None:
        """End the open item."""

    def _emit_end(self) -> None:
        """Emit the events after the last item."""
        raise NotImplementedError

    def _emit_error(self, error: dict[str, Any]) -> None:
        """Emit the events of an error that ends the stream."""
        self._emit("error", error=error)

    def _answer(self) -> dict[str, Any]:
        """Return the non-streamed answer."""
        raise NotImplementedError
