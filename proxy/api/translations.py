"""``POST /v1/responses`` and ``/v1/audio/transcriptions``: a chat for the instances, another API for the client.

Here the events of an answer are parsed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from epd_serve.protocol.openai.generation import GenerationRequest
from epd_serve.protocol.openai.response_events import ResponseBuilder, event_bytes
from epd_serve.protocol.openai.responses import ResponsesCall
from epd_serve.protocol.openai.transcriptions import TranscriptionCall
from proxy.dispatch.job import Job
from proxy.http.client import JSON, Outlet

_END_OF_EVENT = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class Translation:
    """The answer to one request of another API. As an outlet, it takes whole events of chat chunks and gives whole
    events."""

    #: Of an answer in one piece.
    content_type = JSON

    def over(self, outlet: Outlet) -> Outlet:
        """Have a streamed answer translated on its way to ``outlet``."""
        self._outlet = outlet
        self.start = outlet.start
        self.drain = outlet.drain
        return self

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        events = bytes(data).split(_END_OF_EVENT)
        body = b"".join([self._translated(event.removeprefix(_DATA)) for event in events if event])
        return self._outlet.write(body, last=last) if body or last else True

    def _translated(self, data: bytes) -> bytes:
        """The events that a chunk, or what ends them, becomes."""
        raise NotImplementedError

    def whole(self, answer: bytes) -> bytes:
        """The same for an answer in one piece."""
        raise NotImplementedError


class ResponsesTranslation(Translation):
    """Makes answers of ``POST /v1/responses`` from those of a chat."""

    def __init__(self, request: GenerationRequest, job: Job) -> None:
        assert isinstance(request, ResponsesCall)
        self._builder = ResponseBuilder(request.asked, id=job.id, created=job.output.created, model=job.model)

    def _translated(self, data: bytes) -> bytes:
        if data == _DONE:
            events = self._builder.end()
        else:
            chunk = msgspec.json.decode(data)
            events = self._builder.failed(chunk["error"]) if "error" in chunk else self._builder.feed(chunk)
        return b"".join([event_bytes(*event) for event in events])

    def whole(self, answer: bytes) -> bytes:
        return msgspec.json.encode(self._builder.whole(msgspec.json.decode(answer)))


class TranscriptTranslation(Translation):
    """Makes answers of ``POST /v1/audio/transcriptions`` from those of a chat."""

    def __init__(self, request: GenerationRequest, job: Job) -> None:
        assert isinstance(request, TranscriptionCall)
        self._is_text = request.asked.response_format == "text"
        if self._is_text:
            self.content_type = b"text/plain; charset=utf-8"
        self._text: list[str] = []
        self._usage: dict[str, Any] | None = None

    def whole(self, answer: bytes) -> bytes:
        whole = msgspec.json.decode(answer)
        text = whole["choices"][0]["message"]["content"] or ""
        if self._is_text:
            return f"{text}\n".encode()
        return msgspec.json.encode({"text": text, "usage": _usage(whole["usage"])})

    def _translated(self, data: bytes) -> bytes:
        event = self._event_of(data)
        return b"" if event is None else _DATA + msgspec.json.encode(event) + _END_OF_EVENT

    def _event_of(self, data: bytes) -> dict[str, Any] | None:
        if data == _DONE:
            done = {"type": "transcript.text.done", "text": "".join(self._text)}
            return done if self._usage is None else {**done, "usage": self._usage}
        chunk: dict[str, Any] = msgspec.json.decode(data)
        if "error" in chunk:
            return chunk
        if chunk.get("usage") is not None:
            self._usage = _usage(chunk["usage"])
        delta = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if not delta:
            return None
        self._text.append(delta)
        return {"type": "transcript.text.delta", "delta": delta}


def _usage(counts: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": counts["prompt_tokens"],
        "output_tokens": counts["completion_tokens"],
        "total_tokens": counts["total_tokens"],
    }
