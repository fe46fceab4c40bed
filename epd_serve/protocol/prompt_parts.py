"""The parts of a request on the wire: messages, media as references, options."""

from __future__ import annotations

from typing import Literal

import msgspec

from epd_serve.protocol.codec import Message


class MediaRef(Message, frozen=True):
    """A media item without its bytes.

    Attributes:
        mm_hash: full-width blake3 hex over media bytes, modality and the model's ``media_fingerprint``.
        width, height: pixels as displayed (EXIF orientation applied), read from the header alone.
        low_detail: width and height are those to which the picture is scaled down before its encode.
    """

    mm_hash: str
    width: int
    height: int
    modality: Literal["image"] = "image"
    low_detail: bool = False


class Part(Message, frozen=True):
    """A piece of a message's content: text, or the next media item in order (``type == "image"``)."""

    type: Literal["text", "image"]
    text: str = ""


class CalledFunction(Message, frozen=True):
    """A call in a chat's history; ``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class ChatMessage(Message, frozen=True):
    role: str
    content: list[Part]
    tool_calls: list[CalledFunction] = msgspec.field(default_factory=list)
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


class PromptOptions(Message, frozen=True):
    """The options by which messages or a prompt become tokens.

    Attributes:
        add_special_tokens: None leaves it to the tokenizer for a prompt, and adds none to a rendered chat.
        truncate: number of the last tokens to keep; None: all.
        tools, template_kwargs: JSON for the chat template, or "".
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    truncate: int | None = None
    tools: str = ""
    template_kwargs: str = ""


class OutputOptions(Message, frozen=True):
    """The shape in which the client wants its answer.

    ``kind`` chooses between chat.completion and text_completion objects; ``id``, ``created`` and ``model``
    appear in every object. ``first_index`` is that of the first choice; ``echo`` puts the prompt before each.
    ``for_vllm`` is a JSON object of fields that only vLLM has (:mod:`epd_serve.protocol.vllm_requests`), or "".
    """

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    first_index: int = 0
    echo: bool = False
    for_vllm: str = ""
