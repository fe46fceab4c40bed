"""OpenAI response objects, as the bytes that travel: stream events and whole answers.

Rules of the load testers in use: one event is ``data: {json}`` and two line feeds; the role comes with the first
token; one token an event; usage in a last event of its own, then ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_serve.protocol.tool_format import Call, CallDelta, call_object
from epd_serve.protocol.wire import OutputOptions

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token's log-probability with its text."""

    text: str
    logprob: float
    top: list[tuple[str, float]]

    def entry(self) -> dict[str, Any]:
        """The object that chat answers list under ``logprobs.content``."""
        top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in self.top]
        return {
            "token": self.text,
            "logprob": self.logprob,
            "bytes": list(self.text.encode()),
            "top_logprobs": top,
        }


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """A finished choice, for an answer in one piece."""

    index: int
    text: str
    finish_reason: str
    logprobs: list[TokenText] | None
    calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def delta_event(
    options: OutputOptions,
    index: int,
    text: str,
    *,
    first: bool,
    finish_reason: str | None,
    logprobs: list[TokenText] | None,
    text_offset: int,
    usage: Usage | None,
    calls: Sequence[CallDelta] = (),
) -> bytes:
    """The event of one token.

    Args:
        first: whether this is the choice's first token, which brings the role along.
        text_offset: characters of this choice that went before (completions report it with logprobs).
        usage: the counts so far, where the client wants them in every event.
        calls: what the token added to tool calls.
    """
    if options.kind == "chat":
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            delta["tool_calls"] = _call_deltas(options, options.first_index + index, calls)
        choice: dict[str, Any] = {"index": options.first_index + index, "delta": delta}
    else:
        choice = {"index": options.first_index + index, "text": text}
    choice["logprobs"] = _logprobs(options, logprobs, text_offset)
    choice["finish_reason"] = finish_reason
    body = _envelope(options, stream=True)
    body["choices"] = [choice]
    if usage is not None:
        body["usage"] = usage.to_dict()
    return event(body)


def usage_event(options: OutputOptions, usage: Usage) -> bytes:
    """The event without choices that ``include_usage`` asks for."""
    return event({**_envelope(options, stream=True), "choices": [], "usage": usage.to_dict()})


def whole_answer(options: OutputOptions, choices: list[ChoiceText], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed."""
    body = _envelope(options, stream=False)
    body["choices"] = [_whole_choice(options, choice) for choice in sorted(choices, key=lambda c: c.index)]
    body["usage"] = usage.to_dict()
    return _encode(body)


def _whole_choice(options: OutputOptions, choice: ChoiceText) -> dict[str, Any]:
    content: dict[str, Any]
    if options.kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text.strip() or None
            message["tool_calls"] = [
                call_object(options.id, options.first_index + choice.index, i, call.name, call.arguments)
                for i, call in enumerate(choice.calls)
            ]
        content = {"message": message}
    else:
        content = {"text": choice.text}
    return {
        "index": options.first_index + choice.index,
        **content,
        "logprobs": _logprobs(options, choice.logprobs, 0),
        "finish_reason": choice.finish_reason,
    }


def _call_deltas(options: OutputOptions, choice: int, calls: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """What is new, one entry for each call."""
    entries: dict[int, dict[str, Any]] = {}
    for call in calls:
        entry = entries.setdefault(call.index, {"index": call.index})
        if call.name is not None:
            entry |= call_object(options.id, choice, call.index, call.name, "")
        function = entry.setdefault("function", {"arguments": ""})
        function["arguments"] += call.arguments
    return list(entries.values())


def _logprobs(options: OutputOptions, tokens: list[TokenText] | None, offset: int) -> dict[str, Any] | None:
    if tokens is None:
        return None
    if options.kind == "chat":
        return {"content": [token.entry() for token in tokens], "refusal": None}
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top) for token in tokens],
        "text_offset": offsets,
    }


def _envelope(options: OutputOptions, *, stream: bool) -> dict[str, Any]:
    if options.kind == "completion":
        name = "text_completion"
    else:
        name = "chat.completion.chunk" if stream else "chat.completion"
    return {"id": options.id, "object": name, "created": options.created, "model": options.model}
