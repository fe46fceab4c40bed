"""OpenAI responses as bytes: stream events and whole answers.

Load testers expect this stream format: an event is ``data: {json}`` and two line feeds; one token per event; the
role with the first token; usage in a separate last event, then ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_serve.protocol.openai.tool_format import Call, CallDelta, call_object
from epd_serve.protocol.wire import OutputOptions

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer with its log-probability.

    Attributes:
        token: its bytes, possibly only part of a character.
        logprob: None for the first prompt token.
        top: the most likely tokens at this position, best first.
        offset: index of its first character in the choice's text.
    """

    token: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]
    offset: int

    def entry(self) -> dict[str, Any]:
        """Return the entry for ``logprobs.content`` of a chat answer."""
        return {
            **_token_entry(self.token, self.logprob),
            "top_logprobs": [_token_entry(token, value) for token, value in self.top],
        }

    def alternatives(self) -> dict[str, float] | None:
        """Return the entry for ``logprobs.top_logprobs`` of a completion, always including the chosen token."""
        if self.logprob is None:
            return None
        by_text: dict[str, float] = {}
        for token, value in (*self.top, (self.token, self.logprob)):  # for equal texts keep the likeliest
            by_text.setdefault(token_text(token), value)
        return by_text


def token_text(token: bytes) -> str:
    """Return a token's text, or OpenAI's spelling of its bytes if it is only part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _token_entry(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """A finished choice of a non-streamed answer."""

    index: int
    text: str
    finish_reason: str
    logprobs: list[ScoredToken] | None
    calls: Sequence[Call] = ()
    reasoning: str = ""
    token_ids: Sequence[int] = ()
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer.

    ``cached_tokens`` of the prompt came from P's prefix cache; ``reasoning_tokens`` of the answer lie between
    ``<think>`` and ``</think>``.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> Usage:
        """Parse the ``usage`` object of an answer."""
        details = usage.get("prompt_tokens_details") or {}
        parts = usage.get("completion_tokens_details") or {}
        return cls(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            details.get("cached_tokens") or 0,
            parts.get("reasoning_tokens") or 0,
        )

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def delta_event(
    options: OutputOptions,
    index: int,
    text: str,
    *,
    first: bool,
    finish_reason: str | None,
    logprobs: list[ScoredToken] | None,
    usage: Usage | None,
    calls: Sequence[CallDelta] = (),
    reasoning: str = "",
    stop_reason: str | None = None,
    prompt_ids: Sequence[int] = (),
    token_ids: Sequence[int] = (),
) -> bytes:
    """Encode the event for one token.

    Args:
        first: whether this is the choice's first token, whose event carries the role.
        usage: counts so far, if the client wants them in every event.
        calls: parts that the token added to tool calls.
        stop_reason: the stop string that ended the text.
        prompt_ids, token_ids: sent if the client wants token ids; ``prompt_ids`` only with the first token.
    """
    if options.kind == "chat":
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta |= {"reasoning_content": reasoning} if reasoning and not text else {"content": text}
        if calls:
            delta["tool_calls"] = _call_deltas(options, options.first_index + index, calls)
        choice: dict[str, Any] = {"index": options.first_index + index, "delta": delta}
    else:
        choice = {"index": options.first_index + index, "text": text}
    choice["logprobs"] = None if logprobs is None else _logprobs(options, logprobs)
    choice["finish_reason"] = finish_reason
    if stop_reason is not None:
        choice["stop_reason"] = stop_reason
    body = _envelope(options, stream=True)
    if options.token_ids:
        choice["token_ids"] = token_ids
        if first:
            (body if options.kind == "chat" else choice)["prompt_token_ids"] = prompt_ids
    body["choices"] = [choice]
    if usage is not None:
        body["usage"] = usage.to_dict()
    elif options.include_usage:
        body["usage"] = None
    return event(body)


class DeltaTemplate:
    """Template for events of a choice that carry only text, or only reasoning."""

    def __init__(self, options: OutputOptions, index: int, *, is_reasoning: bool = False) -> None:
        empty = delta_event(options, index, "", first=False, finish_reason=None, logprobs=None, usage=None)
        field = b'"content":' if options.kind == "chat" else b'"text":'  # in a string the quotes would be escaped
        if is_reasoning:
            empty, field = empty.replace(field, b'"reasoning_content":', 1), b'"reasoning_content":'
        self._before, _, self._behind = empty.partition(field + b'""')
        self._before += field

    def event(self, text: str) -> bytes:
        """Return the same bytes as :func:`delta_event`."""
        return b"%b%b%b" % (self._before, _encode(text), self._behind)


def usage_event(options: OutputOptions, usage: Usage) -> bytes:
    """Encode the final event with the usage and no choices (``include_usage``)."""
    return event({**_envelope(options, stream=True), "choices": [], "usage": usage.to_dict()})


def whole_answer(
    options: OutputOptions, choices: list[ChoiceText], usage: Usage, prompt_ids: Sequence[int]
) -> bytes:
    """Encode a non-streamed answer."""
    body = _envelope(options, stream=False)
    body["choices"] = [_whole_choice(options, choice) for choice in sorted(choices, key=lambda c: c.index)]
    if options.token_ids:
        for one in [body] if options.kind == "chat" else body["choices"]:
            one["prompt_token_ids"] = prompt_ids
    body["usage"] = usage.to_dict()
    return _encode(body)


def _whole_choice(options: OutputOptions, choice: ChoiceText) -> dict[str, Any]:
    content: dict[str, Any]
    if options.kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text.strip() or None
            message["tool_calls"] = [
                call_object(options.id, options.first_index + choice.index, i, call.name, call.arguments)
                for i, call in enumerate(choice.calls)
            ]
        content = {"message": message}
    else:
        content = {"text": choice.text}
    if options.token_ids:
        content["token_ids"] = choice.token_ids
    if choice.stop_reason is not None:
        content["stop_reason"] = choice.stop_reason
    return {
        "index": options.first_index + choice.index,
        **content,
        "logprobs": None if choice.logprobs is None else _logprobs(options, choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _call_deltas(options: OutputOptions, choice: int, calls: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Merge new parts of tool calls into one entry per call."""
    entries: dict[int, dict[str, Any]] = {}
    for call in calls:
        entry = entries.setdefault(call.index, {"index": call.index})
        if call.name is not None:
            entry |= call_object(options.id, choice, call.index, call.name, "")
        function = entry.setdefault("function", {"arguments": ""})
        function["arguments"] += call.arguments
    return list(entries.values())


def _logprobs(options: OutputOptions, tokens: list[ScoredToken]) -> dict[str, Any]:
    if options.kind == "chat":
        return {"content": [token.entry() for token in tokens], "refusal": None}
    return {
        "tokens": [token_text(token.token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [token.alternatives() for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _envelope(options: OutputOptions, *, stream: bool) -> dict[str, Any]:
    if options.kind == "completion":
        name = "text_completion"
    else:
        name = "chat.completion.chunk" if stream else "chat.completion"
    return {"id": options.id, "object": name, "created": options.created, "model": options.model}
