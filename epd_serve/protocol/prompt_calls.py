"""Questions about prompts that a gateway asks an instance: wire messages like those of :mod:`wire`."""

from __future__ import annotations

from epd_serve.protocol.wire import ChatMessage, MediaRef, Message, PromptOptions


class TokenizeRequest(Message, frozen=True):
    """Ask for the tokens of a chat or prompt; ``items`` need a size alone."""

    items: list[MediaRef]
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    prompting: PromptOptions = PromptOptions()
    with_texts: bool = False


class TokenizeReply(Message, frozen=True):
    """``texts`` are those of the single tokens, where they were asked for."""

    tokens: list[int]
    texts: list[str] | None = None


class DetokenizeRequest(Message, frozen=True):
    tokens: list[int]


class DetokenizeReply(Message, frozen=True):
    text: str
