"""A streamed answer: the times of its events and tokens, and whether it counts as a success."""

from __future__ import annotations

from typing import Any

import msgspec

from epd_serve.bench.types import Failure

_DETAIL = 400


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


class Answer:
    """Reads server-sent events as their bytes come; ``at_s`` is when they came, before any parsing.

    Attributes:
        sent_s: when sending began, by ``perf_counter``; connecting comes after it.
        finish_s: when the last byte came, or the failure was known.
        status: of HTTP; 0 before the answer's head.
        text: pieces of the first choice's content.
        failure, detail: the first thing that was wrong; then the rest is not read.
    """

    def __init__(self, sent_s: float = 0.0) -> None:
        self.sent_s = self.finish_s = sent_s
        self.status = 0
        self.first_chunk_s: float | None = None
        self.last_event_s: float | None = None
        self.token_times_s: list[float] = []
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.failure: Failure | None = None
        self.detail = ""
        self._buffer = b""
        self._event_name = b""
        self._empty_times_s: list[float] = []
        self._open: set[int] = set()
        self._finished: set[int] = set()
        self._done = False

    def fail(self, failure: Failure, detail: str) -> None:
        """Record a failure, unless there is an earlier one."""
        if self.failure is None:
            self.failure, self.detail = failure, detail

    def feed(self, data: bytes, at_s: float) -> None:
        """Take the next bytes of the body."""
        if self._buffer:
            data = self._buffer + data
        lines = data.split(b"\n")
        self._buffer = lines.pop()
        for line in lines:
            if line[-1:] == b"\r":
                line = line[:-1]
            if line[:5] == b"data:":
                self._data(line[5:].strip(), at_s)
            elif not line:
                self._event_name = b""
            elif line[:6] == b"event:":
                self._event_name = line[6:].strip()

    def end(self, *, complete: bool, reason: str = "") -> None:
        """Take the end of the body.

        Args:
            complete: whether the body is complete by HTTP's rules.
            reason: the connection's error, where it is not.
        """
        if self.failure is not None:
            return
        if not complete and not self._done:
            self.fail(Failure.CUT_STREAM, reason or "the connection was closed in mid-stream")
        elif not self._finished or self._finished != self._open:
            if self._done:
                self.fail(Failure.NO_FINISH_REASON, "[DONE] came, but no finish_reason")
            elif self._buffer.startswith(b"data:") or self.first_chunk_s is not None:
                self.fail(Failure.CUT_STREAM, "the answer ended with neither a finish_reason nor [DONE]")
            else:
                self.fail(Failure.MALFORMED, "no event came")
        elif not self.token_times_s:
            if not self.completion_tokens or not self._empty_times_s:
                self.fail(Failure.NO_TOKENS, "the answer has no token")
                return
            # all are special tokens: the last events stand for them, as many as the server's usage says
            self.token_times_s = self._empty_times_s[-self.completion_tokens :]

    def _data(self, data: bytes, at_s: float) -> None:
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
            self.fail(Failure.IN_STREAM_ERROR, _message(chunk, data))
            return
        if chunk.usage is not None:
            self._count(chunk.usage)
        has_token = False
        for choice in chunk.choices or ():
            has_token |= self._choice(choice, at_s)
        if has_token:
            self.token_times_s.append(at_s)
            self.last_event_s = at_s
            self._empty_times_s.clear()

    def _choice(self, choice: _Choice, at_s: float) -> bool:
        """Take a choice of an event; return whether the event has a token of it."""
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

    def _count(self, usage: _Usage) -> None:
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens


def error_message(body: bytes) -> str:
    """Return the message in the body of an error answer, or the body's first characters where it has none."""
    try:
        return _message(_decoder.decode(body), body)
    except msgspec.MsgspecError:
        return _quote(body)


def _message(chunk: _Chunk, data: bytes) -> str:
    if isinstance(chunk.error, dict) and isinstance(chunk.error.get("message"), str):
        return str(chunk.error["message"])[:_DETAIL]
    return chunk.message[:_DETAIL] if chunk.message else _quote(data)


def _quote(data: bytes) -> str:
    return data[:_DETAIL].decode("utf-8", "replace") or "nothing"
