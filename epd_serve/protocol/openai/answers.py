"""Models of the endpoints' answers: the OpenAPI document, short answers, and tests against real ones."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(_Answer):
    """``param`` names the field of the request that is wrong, as in ``messages[0].content``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    error: ErrorDetail


class PromptTokensDetails(_Answer):
    """``cached_tokens`` of a prompt were in the prefix cache."""

    cached_tokens: int


class UsageCounts(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunctionAnswer(_Answer):
    name: str
    arguments: str


class ToolCallAnswer(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] = Field(default_factory=list)


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts


class FunctionDelta(_Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(_Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(_Answer):
    role: Literal["assistant"] | None = None
    content: str
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChunkChoice(_Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(_Answer):
    """One event of a stream, which ends with ``data: [DONE]``. With ``include_usage``, the last chunk has the
    usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageCounts | None = None


class TextLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(_Answer):
    """A whole completion; in a stream, each event is one of these."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts | None = None


class ResponseAnswer(BaseModel):
    """OpenAI's response object; the fields that are always null here are not listed."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    store: Literal[False]
    incomplete_details: dict[str, str] | None
    metadata: dict[str, str]


class InputTokens(_Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class TranscriptUsage(_Answer):
    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcript(_Answer):
    text: str
    usage: TranscriptUsage


class TokenizeResult(_Answer):
    """``max_model_len`` is the most tokens of a prompt and its answer together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResult(_Answer):
    prompt: str


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class InstanceState(BaseModel):
    role: str | None
    ready: bool


class ReadyAnswer(BaseModel):
    """``status`` is "ready", or says which stages no instance covers."""

    status: str
    instances: dict[str, InstanceState] = Field(default_factory=dict)


class LiveAnswer(_Answer):
    status: Literal["live"]
