"""Body of ``POST /v1/audio/transcriptions``, checked field by field, and the chat that it asks for.

Models that take sounds answer chats: the file is the chat's one item, behind it stands an instruction.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.fields import RequestModel, explain
from epd_serve.protocol.forms import read_form
from epd_serve.protocol.messages import MediaSource
from epd_serve.protocol.openai import ChatCompletionRequest, StreamOptions

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
