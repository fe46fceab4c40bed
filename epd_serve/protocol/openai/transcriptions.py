"""Body of ``POST /v1/audio/transcriptions``, checked field by field, and the chat that it asks for.

Models that take sounds answer chats: the file is the chat's one item, behind it stands an instruction.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import RequestModel, explain
from epd_serve.protocol.openai.generation import ChatCompletionRequest, StreamOptions
from epd_serve.protocol.openai.messages import MediaSource

_INSTRUCTION = "Transcribe what is said. Answer with the transcript alone."


def _from_text(value: Any) -> Any:
    """A form's text as the number or truth value that it is."""
    if value in ("true", "false"):
        return value == "true"
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


class TranscriptionRequest(RequestModel):
    """Body of ``POST /v1/audio/transcriptions``, a form. ``language`` is a code as "en", or a name; the transcript
    goes on behind ``prompt``."""

    file: bytes
    model: str | None = None
    language: str | None = Field(None, min_length=1, max_length=40, pattern=r"^[\w -]+$")
    prompt: str | None = Field(None, max_length=1 << 16)
    response_format: Literal["json", "text"] = "json"
    temperature: Annotated[float | None, BeforeValidator(_from_text)] = Field(None, ge=0, le=2)
    stream: Annotated[bool | None, BeforeValidator(_from_text)] = None

    @classmethod
    def parse(cls, body: bytes | bytearray) -> TranscriptionCall:
        """Raises InvalidRequest with ``param`` set."""
        fields: dict[str, Any] = {}
        for name, value in read_form(body).items():
            try:
                fields[name] = value if name == "file" else value.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"{name[:100]}: the text is not UTF-8", param=name[:100]) from error
        try:
            asked = cls.model_validate(fields)
        except ValidationError as error:
            raise explain(error, cls) from error
        return TranscriptionCall.of(asked)

    @property
    def instruction(self) -> str:
        """The text behind the item."""
        words = [_INSTRUCTION]
        if self.language is not None:
            words.append(f"The language is {self.language}.")
        if self.prompt:
            words.append(f"It goes on behind this text: {self.prompt}")
        return " ".join(words)


class TranscriptionCall(ChatCompletionRequest):
    """The chat of a :class:`TranscriptionRequest`, which it keeps as ``asked``."""

    asked: TranscriptionRequest

    @classmethod
    def of(cls, asked: TranscriptionRequest) -> Self:
        item = {"type": "audio_url", "audio_url": {"url": "data:"}}
        content = [item, {"type": "text", "text": asked.instruction}]
        request = cls.model_validate(
            {
                "asked": asked,
                "model": asked.model,
                "messages": [{"role": "user", "content": content}],
                "temperature": asked.temperature or 0.0,
                "stream": asked.stream,
                "stream_options": StreamOptions(include_usage=True) if asked.stream else None,
            }
        )
        request._check()
        return request

    def media(self) -> list[MediaSource]:
        return [MediaSource(url="data:", param="file", modality="audio", raw=self.asked.file)]


_MAX_PARTS = 32
_MAX_HEAD = 4096
_NAME = re.compile(rb'[;\s]name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)


def read_form(body: bytes | bytearray) -> dict[str, bytes]:
    """The fields by name; of a file its content. The boundary is the body's first line.

    Raises InvalidRequest for a body that is no form, is cut off, or has a field twice.
    """
    boundary = bytes(body[: body.find(b"\r\n", 0, 256)]) if body[:2] == b"--" else b""
    if not 2 < len(boundary) <= 72:
        raise InvalidRequest("the body must be multipart/form-data with a field 'file'", code="invalid_form")
    fields: dict[str, bytes] = {}
    position = len(boundary) + 2
    while True:
        end = body.find(b"\r\n" + boundary, position)
        split = body.find(b"\r\n\r\n", position, position + _MAX_HEAD)
        if end < 0 or split < 0 or split > end or len(fields) == _MAX_PARTS:
            raise InvalidRequest("the form is cut off, or broken", code="invalid_form")
        found = _NAME.search(body, position, split)
        if found is None:
            raise InvalidRequest("a part of the form has no name", code="invalid_form")
        name = (found[1] or found[2] or b"").decode("utf-8", "replace")
        if name in fields:
            raise InvalidRequest(f"the form has the field {name[:100]!r} twice", param=name[:100])
        fields[name] = bytes(body[split + 4 : end])
        position = end + 2 + len(boundary)
        if body[position : position + 2] == b"--":
            return fields
        if body[position : position + 2] != b"\r\n":
            raise InvalidRequest("the form is cut off, or broken", code="invalid_form")
        position += 2
