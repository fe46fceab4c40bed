"""Validate OpenAI chat and completion requests and convert them to wire messages.

``ChatCompletionRequest.parse`` and ``CompletionRequest.parse`` take the body's bytes. They raise InvalidRequest
with ``param`` set and a message that says how to fix the request.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, Field

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import (
    WHOLE,
    WIRE_INTEGERS,
    Body,
    ChatNoEffect,
    CommonNoEffect,
    Labels,
    RequestModel,
    StopString,
    StopStrings,
    TokenIds,
)
from epd_serve.protocol.openai.messages import (
    MAX_PARTS,
    AnyProcessorKwargs,
    MediaIoKwargs,
    MediaSource,
    Messages,
    ProcessorKwargs,
    media_of,
    wire_messages,
)
from epd_serve.protocol.openai.tools import (
    MAX_TOOLS,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
    json_text,
    make_grammar,
)
from epd_serve.protocol.wire import ChatMessage, OutputOptions, PromptOptions
from epd_serve.types import SAMPLING_DEFAULTS, Grammar, SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_STOP_TOKENS = 4096
#: Limit on prompts × choices of a completion request.
MAX_PROMPTS = 128
#: OpenAI's default for /v1/completions; a chat without max_tokens may fill the context.
COMPLETION_MAX_TOKENS = 16

Tokens = Annotated[int, Field(ge=1, lt=WIRE_INTEGERS), WHOLE]
TokensOrNone = Annotated[int, Field(ge=0, lt=WIRE_INTEGERS), WHOLE]
NumTop = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE]
NumTokens = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda number: max(number, 0)), WHOLE]
Seed = Annotated[int, Field(ge=-WIRE_INTEGERS, lt=WIRE_INTEGERS), WHOLE]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
NumChoices = Annotated[int, Field(ge=1, le=128), WHOLE]
NumPromptTop = Annotated[int, Field(ge=-1, le=1 << 20), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Biases = Annotated[
    dict[TokenText, Bias],
    Field(max_length=MAX_BIASED_TOKENS),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send the usage in a last event.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every event.")
    include_obfuscation: Literal[False] | None = Field(None, description="Events are not padded.")


class CommonRequest(Body, Labels, CommonNoEffect):
    """Fields that all generation requests share."""

    model: str | None = Field(None, description="Name of the model; default: the served model.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling: probability mass to keep.")
    seed: Seed | None = Field(None, description="Sampling seed.")
    priority: Priority | None = Field(None, description="Lower values run first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=4096, description="Share cached prefixes only with requests of equal salt."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Options of a streamed answer.")


class GenerationRequest(CommonRequest, ChatNoEffect):
    """Fields that chats and completions share."""

    #: Whether a structured answer must end where its structure ends.
    ends_with_structure: ClassVar[bool] = True
    kind: ClassVar[Literal["chat", "completion"]]
    id_prefix: ClassVar[str]

    max_tokens: Tokens | None = Field(None, description="Maximum tokens of an answer.")
    min_tokens: TokensOrNone | None = Field(None, description="Minimum tokens of an answer.")
    top_k: NumTokens | None = Field(None, description="Sample among this many likeliest tokens; 0 or -1: all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Minimum token probability relative to the likeliest token."
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="Above 1: discourage tokens of prompt and answer."
    )
    presence_penalty: Penalty | None = Field(None, description="Penalty on tokens in the answer.")
    frequency_penalty: Penalty | None = Field(None, description="Penalty per occurrence of a token in the answer.")
    stop: StopStrings | None = Field(None, description="Strings that stop the answer.")
    stop_token_ids: TokenIds | None = Field(
        None, max_length=MAX_STOP_TOKENS, description="Token ids that stop the answer."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string in the answer.")
    logit_bias: Biases | None = Field(None, description="Bias to add to logits, by token id.")
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, description="Token ids that may occur.")
    bad_words: list[StopString] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="Words that an answer must not contain."
    )
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to the prompt.")
    response_format: ResponseFormat | None = Field(None, description="Structure of the answer.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same in vLLM's form.")
    ignore_eos: bool | None = Field(None, description="Generate past the end-of-sequence token, for benchmarks.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out; default true.")
    n: NumChoices | None = Field(None, description="Number of answers; default 1.")
    return_token_ids: bool | None = Field(None, description="Return the ids of prompt and answer.")

    def _check(self) -> None:
        limit = self.token_limit()
        if limit is not None and (self.min_tokens or 0) > limit:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({limit})", param="min_tokens"
            )
        if self.ends_with_structure and self.grammar() is not None and (self.ignore_eos or self.min_tokens):
            field = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(
                f"{field}: a structured answer ends where its structure ends; remove the field", param=field
            )

    def token_limit(self) -> int | None:
        """Return the token limit of an answer, or None if only the context limits it."""
        return self.max_tokens

    def _thinking_budget(self) -> int | None:
        """Return the token limit of the answer's thinking, or None."""
        return None

    @abstractmethod
    def _logprobs(self) -> int | None:
        """Return the number of alternatives to report per token, or None to report no log-probabilities."""

    def grammar(self) -> Grammar | None:
        """Return the grammar that the answer must follow, or None.

        Raises InvalidRequest for contradictory fields.
        """
        return make_grammar(None, None, True, self.response_format, self.structured_outputs)

    def media(self) -> list[MediaSource]:
        """Return the media items in request order."""
        return []

    def chat(self) -> list[ChatMessage] | None:
        """Return the chat with references for media, or None for a completion."""
        return None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts of a completion."""
        return []

    def prompting(self) -> PromptOptions:
        """Return the options for tokenizing the prompt."""
        return PromptOptions(add_special_tokens=self.add_special_tokens, cache_salt=self.cache_salt or "")

    def output(self, *, id: str, created: int, model: str) -> OutputOptions:
        """Return the format of the answer; ``created`` is in seconds since the epoch."""
        options = self.stream_options if self.stream else None
        return OutputOptions(
            kind=self.kind,
            id=f"{self.id_prefix}-{id}",
            created=created,
            model=model,
            stream=bool(self.stream),
            include_usage=options is not None and options.include_usage is True,
            continuous_usage=options is not None and options.continuous_usage_stats is True,
            token_ids=bool(self.return_token_ids),
        )

    def sampling(self, seed: int) -> SamplingParams:
        """Return sampling parameters with the API's defaults; ``seed`` applies if the request sets none."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name in self.model_fields_set & _SAMPLING_FIELDS
            if (value := getattr(self, name)) is not None
        }
        if self.include_stop_str_in_output is not None:
            given["include_stop"] = self.include_stop_str_in_output
        neutral = [name for name, value in given.items() if SAMPLING_DEFAULTS.get(name) == value]
        return SamplingParams(
            **{"seed": seed, **given},
            max_tokens=self.token_limit(),
            logprobs=self._logprobs(),
            grammar=self.grammar(),
            neutral=tuple(sorted(neutral)),
            thinking_budget=self._thinking_budget(),
        )


#: Fields that reach the instance under the same name.
_SAMPLING_FIELDS = (GenerationRequest.model_fields.keys() & SamplingParams.__struct_fields__) - {"max_tokens"}


class ChatPrompt(Body):
    """Fields that determine the prompt tokens of a chat."""

    messages: Messages | None = Field(None, description="A chat.")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to the prompt.")
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the assistant's header.")
    continue_final_message: bool | None = Field(None, description="Continue the assistant's last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Functions the model may call.")
    media_io_kwargs: MediaIoKwargs | None = Field(None, description="How media are read.")
    mm_processor_kwargs: ProcessorKwargs | None = Field(None, description="How the processor prepares media.")

    def _check(self) -> None:
        messages = self.messages or []
        num_parts = sum([len(message.content or ()) for message in messages])
        if num_parts > MAX_PARTS:
            raise InvalidRequest(
                f"messages: {num_parts} parts over all messages; at most {MAX_PARTS}", param="messages"
            )
        if self.mm_processor_kwargs is not None:
            self.media()  # raises for contradictory options
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message contradict each other; send one of them",
                param="add_generation_prompt",
            )
        if self.continue_final_message and (not messages or messages[-1].role != "assistant"):
            raise InvalidRequest(
                "continue_final_message: the last message must be the assistant's", param="continue_final_message"
            )
        super()._check()

    def media(self) -> list[MediaSource]:
        """Return the media items in chat order."""
        return media_of(self.messages or (), self.media_io_kwargs, self.mm_processor_kwargs)

    def chat(self) -> list[ChatMessage] | None:
        """Return the chat with references for media."""
        return None if self.messages is None else wire_messages(self.messages)

    def _template_kwargs(self) -> dict[str, Any] | None:
        return self.chat_template_kwargs

    def prompting(self) -> PromptOptions:
        """Return the options for tokenizing the chat."""
        kwargs, tools = self._template_kwargs(), [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return PromptOptions(
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=not self.continue_final_message and self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            tools=json_text(tools, "tools") if tools else "",
            template_kwargs=json_text(kwargs, "chat_template_kwargs") if kwargs else "",
        )


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    kind: ClassVar[Literal["chat", "completion"]] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl"

    messages: Messages
    max_completion_tokens: Tokens | None = Field(None, description="Newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Return the log-probabilities of the tokens.")
    top_logprobs: NumTop | None = Field(None, description="Also return this many alternatives per token.")
    tool_choice: ToolChoice | None = Field(None, description="Whether the model must call a function.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in an answer; default true.")
    reasoning_effort: str | None = Field(
        None, description='A variable of the chat template; "none" sets enable_thinking to false.'
    )
    thinking_token_budget: TokensOrNone | None = Field(None, description="Maximum thinking tokens.")
    verbosity: str | None = Field(None, description="Accepted and ignored.")

    def _check(self) -> None:
        limits = {self.max_tokens, self.max_completion_tokens}
        if len(limits) > 1 and None not in limits:
            raise InvalidRequest(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ; "
                f"send one of them",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        super()._check()

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def grammar(self) -> Grammar | None:
        parallel, form = self.parallel_tool_calls is not False, self.response_format
        return make_grammar(self.tools, self.tool_choice, parallel, form, self.structured_outputs)

    def _template_kwargs(self) -> dict[str, Any] | None:
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        none = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {"reasoning_effort": self.reasoning_effort, **none, **(self.chat_template_kwargs or {})}

    def _thinking_budget(self) -> int | None:
        return self.thinking_token_budget

    def prompting(self) -> PromptOptions:
        options = super().prompting()
        return replace(options, cache_salt=self.cache_salt) if self.cache_salt else options


def _as_prompts(value: Any) -> Any:
    """Return a list of prompts, wrapping a single prompt."""
    if value == []:
        raise InvalidRequest("prompt: the list is empty; it needs one prompt at least", param="prompt")
    is_many = isinstance(value, list) and value and not all(isinstance(one, int) for one in value)
    return value if is_many else [value]


OnePrompt = Annotated[str | TokenIds, Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``: a prompt as text or as token ids, or a list of these."""

    kind: ClassVar[Literal["chat", "completion"]] = "completion"
    id_prefix: ClassVar[str] = "cmpl"

    prompt: Annotated[
        Annotated[list[OnePrompt], Field(fail_fast=True)],
        BeforeValidator(_as_prompts, json_schema_input_type=OnePrompt | list[OnePrompt]),
        Field(min_length=1, max_length=MAX_PROMPTS, description="A text, token ids, or a list of these."),
    ]
    max_tokens: TokensOrNone | None = Field(
        None, description=f"Maximum tokens of an answer; default {COMPLETION_MAX_TOKENS}."
    )
    logprobs: NumTop | None = Field(None, description="Return log-probabilities with this many alternatives.")
    echo: bool | None = Field(None, description="Put the prompt before the answer.")

    def token_limit(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _check(self) -> None:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens: 0 generates nothing; set echo: true to return the prompt", param="max_tokens"
            )
        if len(self.prompt) * (self.n or 1) > MAX_PROMPTS:
            raise InvalidRequest(
                f"prompt: {len(self.prompt)} prompts × {self.n or 1} choices exceed {MAX_PROMPTS} answers",
                param="prompt",
            )
        streaming = self.stream_options if self.stream else None
        if len(self.prompt) > 1 and streaming and streaming.continuous_usage_stats:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats: needs a single prompt; use include_usage",
                param="stream_options.continuous_usage_stats",
            )
        super()._check()

    def _logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        return self.prompt

    def output(self, *, id: str, created: int, model: str) -> OutputOptions:
        return replace(super().output(id=id, created=created, model=model), echo=bool(self.echo))


class VllmFields(GenerationRequest):
    """Fields that a vLLM backend validates. Its structured answers may continue past their end."""

    ends_with_structure: ClassVar[bool] = False

    prompt_logprobs: NumPromptTop | None = Field(None, description="Return log-probabilities of the prompt.")

    def output(self, *, id: str, created: int, model: str) -> OutputOptions:
        options = super().output(id=id, created=created, model=model)
        names = {"return_token_ids", "prompt_logprobs", "reasoning_effort", "thinking_token_budget"}
        own = self.model_dump(include=names, exclude_none=True)
        return replace(options, for_vllm=msgspec.json.encode(own).decode()) if own else options


class VllmChatRequest(VllmFields, ChatCompletionRequest):
    """Body of ``POST /v1/chat/completions``."""

    mm_processor_kwargs: AnyProcessorKwargs | None = None


class VllmCompletionRequest(VllmFields, CompletionRequest):
    """Body of ``POST /v1/completions``."""
