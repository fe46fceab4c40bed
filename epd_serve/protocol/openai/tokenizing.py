"""Bodies of ``POST /tokenize`` and ``/detokenize``, in vLLM's format."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import Body, Labels, TokenIds
from epd_serve.protocol.openai.generation import ChatPrompt
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.openai.translated import TranslatedChat
from epd_serve.protocol.wire import (
    DetokenizeRequest,
    MediaRef,
    TokenizeRequest,
)

_CHAT_FIELDS = ChatPrompt.model_fields.keys() - {"messages", "add_special_tokens"}


class TokenizeResult(BaseModel):
    """Tokens of a prompt."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Maximum tokens of a prompt and its answer together.")
    tokens: list[int] = Field(description="Token ids.")
    token_strs: list[str] | None = Field(description="Text of each token, if requested.")


class DetokenizeResult(BaseModel):
    """Text of tokens."""

    prompt: str = Field(description="The text.")


class TokenizeBody(ChatPrompt, Labels):
    """A ``prompt`` or ``messages``, but not both. The tokens include those of media."""

    model: str | None = Field(None, description="Name of the model; default: the served model.")
    prompt: str | None = Field(None, description="A text.")
    return_token_strs: bool | None = Field(None, description="Also return the text of each token.")

    def _check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        for name in sorted(self.model_fields_set & _CHAT_FIELDS) if self.messages is None else ():
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name}: requires messages, not a prompt", param=name)
        super()._check()

    def message(self, items: list[MediaRef]) -> TokenizeRequest:
        """Return the message to send to an instance; ``items`` are the chat's media."""
        return TokenizeRequest(
            items=items,
            messages=self.chat(),
            prompt=self.prompt,
            prompting=self.prompting(),
            with_texts=bool(self.return_token_strs),
        )

    def answer(self, reply: Any, max_model_len: int) -> TokenizeResult:
        return TokenizeResult.model_construct(
            count=len(reply.tokens), max_model_len=max_model_len, tokens=reply.tokens, token_strs=reply.texts
        )


class DetokenizeBody(Body, Labels):
    model: str | None = Field(None, description="Name of the model; default: the served model.")
    tokens: TokenIds = Field(description="Token ids.")

    def media(self) -> list[MediaSource]:
        return []

    def message(self, items: list[MediaRef]) -> DetokenizeRequest:
        """Return the message to send to an instance; ``items`` is unused."""
        return DetokenizeRequest(tokens=self.tokens)

    def answer(self, reply: Any, max_model_len: int) -> DetokenizeResult:
        return DetokenizeResult(prompt=reply.text)


#: Requests that an instance answers with its tokenizer.
TokenQuestion = TokenizeBody | DetokenizeBody | TranslatedChat
