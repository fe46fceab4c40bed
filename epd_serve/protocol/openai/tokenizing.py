"""Bodies of ``POST /tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import BaseModel, Field

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import Body, Labels, TokenIds
from epd_serve.protocol.openai.generation import ChatPrompt
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import (
    DetokenizeReply,
    DetokenizeRequest,
    MediaRef,
    TokenizeReply,
    TokenizeRequest,
)

_CHAT_FIELDS = ChatPrompt.model_fields.keys() - {"messages", "add_special_tokens"}


class TokenQuestion(Protocol):
    """A body whose answer takes a tokenizer."""

    model: str | None

    def media(self) -> list[MediaSource]:
        """Return the media items of a chat, in order."""
        ...

    def message(self, items: list[MediaRef]) -> TokenizeRequest | DetokenizeRequest:
        """Return the message to an instance that answers the question."""
        ...

    def answer(self, reply: Any, max_model_len: int) -> BaseModel:
        """Return the client's answer, made from the instance's reply."""
        ...


class TokenizeResult(BaseModel):
    """Tokens of a prompt."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")
    tokens: list[int] = Field(description="Token ids.")
    token_strs: list[str] | None = Field(description="Their texts, where they were asked for.")


class DetokenizeResult(BaseModel):
    """Text of tokens."""

    prompt: str = Field(description="The text.")


class TokenizeBody(ChatPrompt, Labels):
    """Exactly one of ``prompt`` and ``messages``; images of messages count as many tokens as they take."""

    model: str | None = Field(None, description="Name of the model; the only one that is served, if absent.")
    prompt: str | None = Field(None, description="A text.")
    return_token_strs: bool | None = Field(None, description="Return the tokens' texts, too.")

    def _check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        for name in sorted(self.model_fields_set & _CHAT_FIELDS) if self.messages is None else ():
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name}: goes with messages, not with a prompt", param=name)
        super()._check()

    def message(self, items: list[MediaRef]) -> TokenizeRequest:
        """Return the message to an instance, with the chat's media as ``items``."""
        return TokenizeRequest(
            items=items,
            messages=self.chat(),
            prompt=self.prompt,
            prompting=self.prompting(),
            with_texts=bool(self.return_token_strs),
        )

    def answer(self, reply: TokenizeReply, max_model_len: int) -> TokenizeResult:
        return TokenizeResult.model_construct(
            count=len(reply.tokens), max_model_len=max_model_len, tokens=reply.tokens, token_strs=reply.texts
        )


class DetokenizeBody(Body, Labels):
    model: str | None = Field(None, description="Name of the model; the only one that is served, if absent.")
    tokens: TokenIds = Field(description="Token ids.")

    def media(self) -> list[MediaSource]:
        return []

    def message(self, items: list[MediaRef]) -> DetokenizeRequest:
        """Return the message to an instance; it has no ``items``."""
        return DetokenizeRequest(tokens=self.tokens)

    def answer(self, reply: DetokenizeReply, max_model_len: int) -> DetokenizeResult:
        return DetokenizeResult(prompt=reply.text)
