"""Translate ``POST /v1/audio/transcriptions`` to a chat: the audio file and an instruction to transcribe it."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.chunks import Usage
from epd_serve.protocol.openai.fields import Body
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.openai.translated import AnswerTranslation, TranslatedChat, encode

_NAME = re.compile(rb'[;\s]name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)


class TranscriptionRequest(Body):
    """Body of ``POST /v1/audio/transcriptions``, a form."""

    model_config = ConfigDict(strict=False)

    file: bytes = Field(description="The audio file.")
    model: str | None = Field(None, description="Name of the model; default: the served model.")
    language: str | None = Field(
        None, min_length=1, max_length=40, pattern=r"^[\w -]+$", description="A code such as en, or a name."
    )
    prompt: str | None = Field(None, max_length=1 << 16, description="Text that the transcript continues.")
    response_format: Literal["json", "text"] = Field("json", description="Format of the answer.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 0.")
    stream: bool | None = Field(None, description="Send the transcript as server-sent events.")

    @classmethod
    def _decode(cls, body: bytes | bytearray) -> dict[str, Any]:
        form = read_form(body)
        return {name: one if name == "file" else one.decode("utf-8", "replace") for name, one in form.items()}


class TranscriptionCall(TranslatedChat):
    """The chat completion that a :class:`TranscriptionRequest` translates to."""

    asked: TranscriptionRequest

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        asked = TranscriptionRequest.parse(body)
        words = ["Transcribe what is said. Answer with the transcript alone."]
        words += [f"The language is {asked.language}."] if asked.language else []
        words += [f"It goes on behind this text: {asked.prompt}"] if asked.prompt else []
        sound = {"type": "audio_url", "audio_url": {"url": "data:"}}
        content = [sound, {"type": "text", "text": " ".join(words)}]
        return cls.of(
            {
                "asked": asked,
                "places": ["file"],
                "model": asked.model,
                "temperature": asked.temperature or 0.0,
                "messages": [{"role": "user", "content": content}],
                "stream": asked.stream,
                "stream_options": {"include_usage": True} if asked.stream else None,
            }
        )

    def media(self) -> list[MediaSource]:
        return [MediaSource(url="data:", param="file", modality="audio", raw=self.asked.file)]

    def translation(self, *, id: str = "", created: int = 0, model: str = "") -> Transcript:
        return Transcript(is_text=self.asked.response_format == "text")


class Transcript(AnswerTranslation):
    """Builds a transcript, or its stream events."""

    def __init__(self, *, is_text: bool) -> None:
        super().__init__()
        self._is_text, self._text = is_text, ""
        if is_text:
            self.content_type = b"text/plain; charset=utf-8"

    def whole(self, answer: bytes) -> bytes:
        body = super().whole(answer)
        return f"{self._text}\n".encode() if self._is_text else body

    def _emit(self, name: str, /, **fields: Any) -> None:
        self._events.append(b"data: " + encode({"type": name, **fields}) + b"\n\n")

    def _extend(self, text: str, logprobs: Any = ()) -> None:
        if self._open == "text":
            self._text += text
            self._emit("transcript.text.delta", delta=text)

    def _emit_end(self) -> None:
        self._emit("transcript.text.done", **self._answer())

    def _answer(self) -> dict[str, Any]:
        usage = self._usage or Usage(0, 0)
        counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        return {"text": self._text, "usage": {"type": "tokens", **counts, "total_tokens": usage.total_tokens}}


def read_form(body: bytes | bytearray) -> dict[str, bytes]:
    """Parse a multipart form into fields by name. Raises InvalidRequest for an invalid form."""
    boundary = b"\r\n" + bytes(body[: max(0, body.find(b"\r\n", 0, 256))])
    fields: dict[str, bytes] = {}
    for part in (b"\r\n" + body).split(boundary)[1:] if boundary.startswith(b"\r\n--") else ():
        if part.startswith(b"--"):
            return fields
        head, _, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if name is None:
            break
        fields[(name[1] or name[2]).decode("utf-8", "replace")] = content
    raise InvalidRequest("the body must be multipart/form-data with a field 'file'", code="invalid_form")
