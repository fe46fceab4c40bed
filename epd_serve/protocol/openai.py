"""Requests of the OpenAI API, checked field by field, and what they become on the wire.

``ChatCompletionRequest.parse`` and ``CompletionRequest.parse`` take the body's bytes. Every refusal is an
InvalidRequest with ``param`` set and a sentence that says what would be right.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.unsupported import LABELS, MESSAGE_NEUTRAL, NEUTRAL, drop_neutral
from epd_serve.protocol.wire import ChatMessage, OutputOptions, Part
from epd_serve.types import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
#: OpenAI's default for /v1/completions; a chat without max_tokens may fill the context.
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """A media item as the request names it; ``param`` is its place in the request, for error messages."""

    url: str
    param: str


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ImageUrl(_Model):
    """``detail`` "low" is refused: pictures are always read at the model's full resolution."""

    url: str
    detail: Literal["auto", "high"] | None = None


class ContentPart(_Model):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], BeforeValidator(_as_parts), Field(min_length=1)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: What an instance can be told: msgpack knows no longer integers.
WIRE_INTEGERS = 2**63


class _Generation(_Model):
    """What chats and completions share. Null means: as if the field were absent."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=WIRE_INTEGERS)
    min_tokens: int | None = Field(None, ge=0, lt=WIRE_INTEGERS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-WIRE_INTEGERS, lt=WIRE_INTEGERS)
    stop: StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        """Body → checked request. Raises InvalidRequest that names the field in ``param``."""
        fields = {name: value for name, value in decode_object(body).items() if name not in LABELS}
        fields = drop_neutral(fields, NEUTRAL)
        try:
            request = cls.model_validate(cls._prepare(fields))
        except ValidationError as error:
            raise _explain(error.errors(include_url=False)[0]) from error
        request._check()
        return request

    @classmethod
    def _prepare(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return fields

    def _check(self) -> None:
        """Rules that join several fields."""
        limit = self._max_tokens()
        if limit is not None and (self.min_tokens or 0) > limit:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({limit})", param="min_tokens"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def token_limit(self) -> int | None:
        """The most tokens that an answer may have; None where the context alone limits it."""
        return self._max_tokens()

    @abstractmethod
    def _logprobs(self) -> int | None:
        """How many alternatives per token to report; None for no log-probabilities at all."""

    def sampling(self, seed: int) -> SamplingParams:
        """Sampling parameters with the API's defaults filled in; ``seed`` is used where the request has none."""
        top_k = self.top_k or 0
        return SamplingParams(
            seed=self.seed if self.seed is not None else seed,
            max_tokens=self._max_tokens(),
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(top_k, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            logprobs=self._logprobs(),
            n=self.n or 1,
        )

    def _output(self, kind: Literal["chat", "completion"], id: str, created: int, model: str) -> OutputOptions:
        options = self.stream_options or StreamOptions()
        return OutputOptions(
            kind=kind,
            id=id,
            created=created,
            model=model,
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )


class ChatCompletionRequest(_Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=WIRE_INTEGERS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @classmethod
    def _prepare(cls, fields: dict[str, Any]) -> dict[str, Any]:
        messages = fields.get("messages")
        if isinstance(messages, list):
            fields["messages"] = [
                drop_neutral(message, MESSAGE_NEUTRAL, f"messages[{index}].")
                if isinstance(message, dict)
                else message
                for index, message in enumerate(messages)
            ]
        return fields

    def _check(self) -> None:
        super()._check()
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequest(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ; "
                f"send one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        for place, part in self._parts():
            wanted = part.text if part.type == "text" else part.image_url
            other = part.image_url if part.type == "text" else part.text
            if wanted is None or other is not None:
                field = "text" if part.type == "text" else "image_url"
                raise InvalidRequest(
                    f"{place}: a part of type {part.type!r} needs exactly the field {field!r}",
                    param=f"{place}.{field}",
                )

    def _parts(self) -> list[tuple[str, ContentPart]]:
        return [
            (f"messages[{i}].content[{j}]", part)
            for i, message in enumerate(self.messages)
            for j, part in enumerate(message.content)
        ]

    def _max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def media(self) -> list[MediaSource]:
        """The media items in the order in which the chat shows them."""
        return [
            MediaSource(url=part.image_url.url, param=f"{place}.image_url.url")
            for place, part in self._parts()
            if part.image_url is not None
        ]

    def chat(self) -> list[ChatMessage]:
        """The chat with media as references; "developer" is today's word for "system" in the OpenAI API."""
        return [
            ChatMessage(
                role="system" if message.role == "developer" else message.role,
                content=[
                    Part(type="image") if part.type == "image_url" else Part(type="text", text=part.text or "")
                    for part in message.content
                ],
            )
            for message in self.messages
        ]

    def output(self, *, id: str, created: int, model: str) -> OutputOptions:
        return self._output("chat", f"chatcmpl-{id}", created, model)


def _single(value: Any) -> Any:
    """A list of exactly one prompt stands for the prompt; more are refused by the field's type."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value


class CompletionRequest(_Generation):
    """Body of ``POST /v1/completions``: one prompt, as text or as token ids."""

    prompt: Annotated[str | list[TokenId], BeforeValidator(_single), Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @classmethod
    def _prepare(cls, fields: dict[str, Any]) -> dict[str, Any]:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(one, int) for one in prompt):
            raise InvalidRequest("prompt: one prompt per request; send several requests instead", param="prompt")
        return fields

    def _max_tokens(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _check(self) -> None:
        if self.max_tokens is None and self.min_tokens is not None and self.min_tokens > COMPLETION_MAX_TOKENS:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is greater than the default of max_tokens "
                f"({COMPLETION_MAX_TOKENS}); send max_tokens, too",
                param="min_tokens",
            )
        super()._check()

    def _logprobs(self) -> int | None:
        return self.logprobs

    def media(self) -> list[MediaSource]:
        return []

    def output(self, *, id: str, created: int, model: str) -> OutputOptions:
        return self._output("completion", f"cmpl-{id}", created, model)


GenerationRequest = ChatCompletionRequest | CompletionRequest


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """JSON object → dict. Raises InvalidRequest that says where the text stops being one."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest('the body must be a JSON object, such as {"messages": [...]}', code="invalid_json")
    return fields


def _explain(error: ErrorDetails) -> InvalidRequest:
    """The first thing that pydantic found, in a sentence, with ``param`` as in ``messages[0].content``."""
    param = ""
    unknown = error["type"] == "extra_forbidden"
    for place, step in enumerate(error["loc"], start=1):
        if isinstance(step, int):
            param += f"[{step}]"
        elif (unknown and place == len(error["loc"])) or (
            step.isidentifier() and step not in ("str", "list")  # the rest names members of a union
        ):
            param += f".{step}" if param else step
    if unknown:
        return InvalidRequest(f"unknown field {param!r}; remove it", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    value = error["input"]
    short = value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 60)
    found = f" (got {value!r})" if short else ""
    message = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in ("model_type", "dict_type"):
        message = "input should be a JSON object"
    return InvalidRequest(f"{param}: {message}{found}", param=param, code="invalid_value")
