"""Parse a streamed answer: event times, token times, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd_serve.bench.types import Failure

_MAX_DETAIL_CHARS = 400


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True, eq=False)
class Answer:
    """Reads server-sent events as their bytes arrive. All times are ``perf_counter`` seconds."""

    sent_s: float = 0.0  # sending began; connecting follows
    finish_s: float = 0.0  # the last byte came, or the failure was known
    status: int = 0  # 0 before the response's head
    first_chunk_s: float | None = None
    last_event_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # pieces of the first choice's content
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    failure: Failure | None = None  # the first fault; later events are ignored
    detail: str = ""
    _buffer: bytes = b""
    _event_name: bytes = b""
    _empty_times_s: list[float] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _done: bool = False

    def fail(self, failure: Failure, detail: str) -> None:
        """Record a failure unless one is recorded already."""
        if self.failure is None:
            self.failure, self.detail = failure, detail

    def feed(self, data: bytes, at_s: float) -> None:
        """Parse the next bytes of the body, which arrived at ``at_s``."""
        if self._buffer:
            data = self._buffer + data
        lines = data.split(b"\n")
        self._buffer = lines.pop()
        for line in lines:
            if line[-1:] == b"\r":
                line = line[:-1]
            if line[:5] == b"data:":
                self._read_event(line[5:].strip(), at_s)
            elif not line:
                self._event_name = b""
            elif line[:6] == b"event:":
                self._event_name = line[6:].strip()

    def end(self, *, complete: bool, reason: str = "") -> None:
        """End the body.

        Args:
            complete: whether the body is complete by HTTP's rules.
            reason: the connection error of an incomplete body.
        """
        if self.failure is not None:
            return
        if not complete and not self._done:
            self.fail(Failure.CUT_STREAM, reason or "the connection closed in mid-stream")
        elif not self._finished or self._finished != self._open:
            if self._done:
                self.fail(Failure.NO_FINISH_REASON, "[DONE] came without a finish_reason")
            elif self._buffer.startswith(b"data:") or self.first_chunk_s is not None:
                self.fail(Failure.CUT_STREAM, "the answer ended with neither a finish_reason nor [DONE]")
            else:
                self.fail(Failure.MALFORMED, "the answer contains no event")
        elif not self.token_times_s:
            if not self.completion_tokens or not self._empty_times_s:
                self.fail(Failure.NO_TOKENS, "the answer contains no token")
                return
            # only special tokens: count the last events, as many as the server's usage says
            self.token_times_s = self._empty_times_s[-self.completion_tokens :]

    def _read_event(self, data: bytes, at_s: float) -> None:
        if self.failure is not None:
            return
        if self.first_chunk_s is None:
            self.first_chunk_s = at_s
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            self.fail(Failure.MALFORMED, f"{error}: {_quote(data)}")
            return
        if chunk.error is not None or chunk.object == "error" or self._event_name == b"error":
            self.fail(Failure.IN_STREAM_ERROR, _find_message(chunk, data))
            return
        if (usage := chunk.usage) is not None:
            if usage.prompt_tokens is not None:
                self.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.completion_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        has_token = False
        for choice in chunk.choices or ():
            has_token |= self._read_choice(choice, at_s)
        if has_token:
            self.token_times_s.append(at_s)
            self.last_event_s = at_s
            self._empty_times_s.clear()

    def _read_choice(self, choice: _Choice, at_s: float) -> bool:
        """Read one choice of an event; return whether it contains a token."""
        self._open.add(choice.index)
        if choice.finish_reason:
            self._finished.add(choice.index)
            self.finish_reason = choice.finish_reason
            self.last_event_s = at_s
        delta = choice.delta
        content = choice.text if delta is None else delta.content
        if content and choice.index == 0:
            self.text.append(content)
        if content or (content is not None and self.token_times_s):
            return True
        if content is not None:
            self._empty_times_s.append(at_s)
        return delta is not None and bool(
            delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.refusal
        )


def error_message(body: bytes) -> str:
    """Return the message of an error response, or the beginning of the body."""
    try:
        return _find_message(_decoder.decode(body), body)
    except msgspec.MsgspecError:
        return _quote(body)


def _find_message(chunk: _Chunk, data: bytes) -> str:
    if isinstance(chunk.error, dict) and isinstance(chunk.error.get("message"), str):
        return str(chunk.error["message"])[:_MAX_DETAIL_CHARS]
    return chunk.message[:_MAX_DETAIL_CHARS] if chunk.message else _quote(data)


def _quote(data: bytes) -> str:
    return data[:_MAX_DETAIL_CHARS].decode("utf-8", "replace") or "nothing"
