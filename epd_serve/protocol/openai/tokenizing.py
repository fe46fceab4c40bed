"""Bodies of ``POST /tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any, Protocol, Self

from pydantic import BaseModel, Field, ValidationError

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.answers import DetokenizeResult, TokenizeResult
from epd_serve.protocol.openai.fields import (
    Labels,
    TokenIds,
    decode_object,
    explain,
)
from epd_serve.protocol.openai.messages import (
    MediaIoKwargs,
    MediaSource,
    Messages,
    ProcessorKwargs,
    check_messages,
    media_of,
    wire_messages,
)
from epd_serve.protocol.openai.tools import MAX_TOOLS, Tool, json_text, tools_text
from epd_serve.protocol.wire import (
    DetokenizeReply,
    DetokenizeRequest,
    MediaRef,
    PromptOptions,
    TokenizeReply,
    TokenizeRequest,
)


class _Call(Labels):
    model: str | None = Field(None, description="Name of the model; the only one that is served, if absent.")

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        """Body → checked request. Raises InvalidRequest that names the field in ``param``."""
        try:
            request = cls.model_validate(decode_object(body))
        except ValidationError as error:
            raise explain(error, cls) from error
        request._check()
        return request

    def _check(self) -> None:
        """Rules that join several fields."""

    def media(self) -> list[MediaSource]:
        """The media items of a chat, in order."""
        return []


class TokenQuestion(Protocol):
    """A body whose answer takes a tokenizer."""

    model: str | None

    def media(self) -> list[MediaSource]:
        """The media items of a chat, in order."""
        ...

    def message(self, items: list[MediaRef]) -> TokenizeRequest | DetokenizeRequest:
        """The message to an instance that answers the question."""
        ...

    def answer(self, reply: Any, max_model_len: int) -> BaseModel:
        """The client's answer, made from the instance's reply."""
        ...


class TokenizeBody(_Call):
    """Exactly one of ``prompt`` and ``messages``; images of messages count as many tokens as they take."""

    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A chat.")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens.")
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the assistant's header.")
    continue_final_message: bool | None = Field(None, description="Go on with the assistant's last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Functions the model may call.")
    return_token_strs: bool | None = Field(None, description="Return the tokens' texts, too.")
    media_io_kwargs: MediaIoKwargs | None = Field(None, description="How media are read.")
    mm_processor_kwargs: ProcessorKwargs | None = Field(None, description="How the processor prepares media.")

    def _check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        chat_only = (
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
            "tools",
            "media_io_kwargs",
            "mm_processor_kwargs",
        )
        for name in chat_only if self.messages is None else ():
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name}: goes with messages, not with a prompt", param=name)
        check_messages(self.messages or ())
        if self.mm_processor_kwargs is not None:
            self.media()  # says what contradicts itself
        if self.continue_final_message and (
            self.add_generation_prompt or (self.messages and self.messages[-1].role != "assistant")
        ):
            raise InvalidRequest(
                "continue_final_message: needs a last message of the assistant's, and no generation prompt",
                param="continue_final_message",
            )

    def media(self) -> list[MediaSource]:
        return media_of(self.messages or (), self.media_io_kwargs, self.mm_processor_kwargs)

    def message(self, items: list[MediaRef]) -> TokenizeRequest:
        """The message to an instance, with the chat's media as ``items``."""
        kwargs = self.chat_template_kwargs
        return TokenizeRequest(
            items=items,
            messages=None if self.messages is None else wire_messages(self.messages),
            prompt=self.prompt,
            prompting=PromptOptions(
                add_special_tokens=self.add_special_tokens,
                add_generation_prompt=not self.continue_final_message and self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
                tools=tools_text(self.tools),
                template_kwargs=json_text(kwargs, "chat_template_kwargs") if kwargs else "",
            ),
            with_texts=bool(self.return_token_strs),
        )

    def answer(self, reply: TokenizeReply, max_model_len: int) -> TokenizeResult:
        return TokenizeResult.model_construct(
            count=len(reply.tokens), max_model_len=max_model_len, tokens=reply.tokens, token_strs=reply.texts
        )


class DetokenizeBody(_Call):
    tokens: TokenIds = Field(description="Token ids.")

    def message(self, items: list[MediaRef]) -> DetokenizeRequest:
        """The message to an instance; it has no ``items``."""
        return DetokenizeRequest(tokens=self.tokens)

    def answer(self, reply: DetokenizeReply, max_model_len: int) -> DetokenizeResult:
        return DetokenizeResult(prompt=reply.text)
