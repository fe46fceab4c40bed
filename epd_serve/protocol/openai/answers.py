"""Models of the endpoints' answers, for the OpenAPI document and for short answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorDetail(_Answer):
    """An error."""

    message: str = Field(description="The fault, and how to avoid it.")
    type: str = Field(description="Class of the error.")
    param: str | None = Field(description="The wrong field of the request, as in messages[0].content.")
    code: str | None = Field(description="A name for programs.")


class ErrorAnswer(_Answer):
    """The answer to a request that failed."""

    error: ErrorDetail = Field(description="The error.")


class PromptTokensDetails(_Answer):
    """Details of a prompt's tokens."""

    cached_tokens: int = Field(description="Tokens found in the prefix cache.")


class UsageCounts(_Answer):
    """Tokens of a request."""

    prompt_tokens: int = Field(description="Tokens of the prompt, media included.")
    completion_tokens: int = Field(description="Tokens of the answer.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails = Field(description="Details of the prompt's tokens.")


class TopLogprob(_Answer):
    """A token and its log-probability."""

    token: str = Field(description="Text of the token.")
    logprob: float | None = Field(description="Its log-probability.")
    bytes: list[int] = Field(description="Its bytes, which may be a part of a character.")


class ContentLogprob(TopLogprob):
    """A token of an answer with its alternatives."""

    top_logprobs: list[TopLogprob] = Field(description="The likeliest tokens in its place.")


class ChatLogprobs(_Answer):
    """Log-probabilities of a chat's answer."""

    content: list[ContentLogprob] = Field(description="Of each token.")
    refusal: None = Field(description="Always null.")


class CalledFunctionAnswer(_Answer):
    """A called function."""

    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="A JSON object as text.")


class ToolCallAnswer(_Answer):
    """A call for the client to make."""

    id: str = Field(description="By which the tool's message refers to the call.")
    type: Literal["function"] = Field(description="All tools are functions.")
    function: CalledFunctionAnswer = Field(description="The call.")


class AnswerMessage(_Answer):
    """The assistant's message."""

    role: Literal["assistant"] = Field(description="Author of the message.")
    content: str | None = Field(description="Its text; null beside calls without text.")
    refusal: None = Field(description="Always null.")
    tool_calls: list[ToolCallAnswer] = Field(default_factory=list, description="Calls for the client to make.")


class ChatChoice(_Answer):
    """One answer."""

    index: int = Field(description="Number of the answer, from 0.")
    message: AnswerMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(description="Log-probabilities, where they were asked for.")
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(description="Why the answer ended.")


class ChatCompletion(_Answer):
    """Answer to a chat."""

    id: str = Field(description="Id of the answer.")
    object: Literal["chat.completion"] = Field(description="Kind of the object.")
    created: int = Field(description="Seconds since the epoch.")
    model: str = Field(description="Name of the model.")
    choices: list[ChatChoice] = Field(description="n answers.")
    usage: UsageCounts = Field(description="Numbers of tokens.")


class TextLogprobs(_Answer):
    """Log-probabilities of a completion, token by token."""

    tokens: list[str] = Field(description="Texts of the tokens.")
    token_logprobs: list[float | None] = Field(description="Their log-probabilities.")
    top_logprobs: list[dict[str, float | None] | None] = Field(description="The likeliest tokens in their places.")
    text_offset: list[int] = Field(description="Where they begin in the text, in characters.")


class CompletionChoice(_Answer):
    """One continuation."""

    index: int = Field(description="Number of the continuation, from 0.")
    text: str = Field(description="Its text.")
    logprobs: TextLogprobs | None = Field(description="Log-probabilities, where they were asked for.")
    finish_reason: Literal["stop", "length"] | None = Field(description="Why it ended; null while it goes on.")


class Completion(_Answer):
    """Continuations of prompts; each event of a stream is one of these."""

    id: str = Field(description="Id of the answer.")
    object: Literal["text_completion"] = Field(description="Kind of the object.")
    created: int = Field(description="Seconds since the epoch.")
    model: str = Field(description="Name of the model.")
    choices: list[CompletionChoice] = Field(description="n continuations of each prompt.")
    usage: UsageCounts | None = Field(None, description="Numbers of tokens.")


class ResponseAnswer(BaseModel):
    """OpenAI's response object, with further fields that echo the request or are null."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str = Field(description="Id of the response.")
    object: Literal["response"] = Field(description="Kind of the object.")
    created_at: int = Field(description="Seconds since the epoch.")
    status: Literal["completed", "incomplete", "in_progress", "failed"] = Field(
        description="State of the response."
    )
    model: str = Field(description="Name of the model.")
    output: list[dict[str, Any]] = Field(description="Messages and function calls.")
    usage: dict[str, Any] | None = Field(description="Numbers of tokens.")
    store: Literal[False] = Field(description="Responses are not stored.")
    incomplete_details: dict[str, str] | None = Field(description="Why the response is incomplete.")
    metadata: dict[str, str] = Field(description="Labels of the request.")


class InputTokens(_Answer):
    """Length of an input."""

    object: Literal["response.input_tokens"] = Field(description="Kind of the object.")
    input_tokens: int = Field(description="Its tokens.")


class TranscriptUsage(_Answer):
    """Tokens of a transcription."""

    type: Literal["tokens"] = Field(description="Unit of the numbers.")
    input_tokens: int = Field(description="Tokens of sound and instruction.")
    output_tokens: int = Field(description="Tokens of the transcript.")
    total_tokens: int = Field(description="Both together.")


class Transcript(_Answer):
    """The words of a sound."""

    text: str = Field(description="The transcript.")
    usage: TranscriptUsage = Field(description="Numbers of tokens.")


class TokenizeResult(_Answer):
    """Tokens of a prompt."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")
    tokens: list[int] = Field(description="Token ids.")
    token_strs: list[str] | None = Field(description="Their texts, where they were asked for.")


class DetokenizeResult(_Answer):
    """Text of tokens."""

    prompt: str = Field(description="The text.")


class ModelCard(_Answer):
    """A model."""

    id: str = Field(description="Its name.")
    object: Literal["model"] = Field(description="Kind of the object.")
    created: int = Field(description="Start of the gateway in seconds since the epoch.")
    owned_by: str = Field(description="The server.")
    root: str = Field(description="Where the model was loaded from.")
    parent: None = Field(description="Always null.")
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")


class ModelList(_Answer):
    """The models served."""

    object: Literal["list"] = Field(description="Kind of the object.")
    data: list[ModelCard] = Field(description="The models.")


class InstanceState(BaseModel):
    """State of an instance."""

    role: str | None = Field(description="Its stages.")
    ready: bool = Field(description="Whether it takes work.")


class ReadyAnswer(BaseModel):
    """Whether requests can be served."""

    status: str = Field(description='"ready", or the stages that no instance covers.')
    instances: dict[str, InstanceState] = Field(default_factory=dict, description="States by name.")


class LiveAnswer(_Answer):
    """Whether the gateway runs."""

    status: Literal["live"] = Field(description="Always live.")
