"""Tokenizer and chat template of a model without weights.

A token is three characters of a small alphabet, a byte, a media placeholder, or the end of an answer. Answers
consist of syllables, so they are printable and look like text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epd_serve.errors import InvalidRequest
from epd_serve.models.generation_config import GenerationConfig
from epd_serve.protocol.wire import ChatMessage, PromptOptions
from epd_serve.types import SamplingParams

_NUM_BYTES = 256
IMAGE, VIDEO, END = range(_NUM_BYTES, _NUM_BYTES + 3)
_SHOWN = {"image": "\N{OBJECT REPLACEMENT CHARACTER}", "video": "\N{FILM PROJECTOR}"}
_END_TEXT = "\N{END OF TRANSMISSION}"
_FIRST = END + 1
_ALPHABET = " abcdefghijklmnopqrstuvwxyz.,?!"
_SIDE = len(_ALPHABET)
_PLACE = {character: place for place, character in enumerate(_ALPHABET)}
NUM_TOKENS = _FIRST + _SIDE**3
_PIECES = re.compile(f"[{re.escape(_ALPHABET)}]{{3}}|.", re.DOTALL)
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def _token(text: str) -> int:
    one, two, three = (_PLACE[character] for character in text)
    return _FIRST + (one * _SIDE + two) * _SIDE + three


#: Tokens that answers consist of.
SYLLABLES = tuple(
    _token(first + consonant + vowel)
    for first in (" ", *_VOWELS)
    for consonant in _CONSONANTS
    for vowel in _VOWELS
)


@dataclass(frozen=True, slots=True)
class _Special:
    content: str
    special: bool = True


class SyllableTokenizer:
    """Implements the part of the transformers tokenizer API that an instance uses."""

    chat_template = ""
    eos_token_id = END
    is_additive = True
    added_tokens_decoder = dict(  # noqa: RUF012
        zip((IMAGE, VIDEO, END), map(_Special, (*_SHOWN.values(), _END_TEXT)), strict=True)
    )

    def __len__(self) -> int:
        return NUM_TOKENS

    def get_vocab(self) -> dict[str, int]:
        """Return only the longest token, the only one that callers need."""
        return {" ba": _token(" ba")}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(_read(text))

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        written = bytearray()
        for token in [ids] if isinstance(ids, int) else ids:
            if token >= _FIRST:
                pair, three = divmod(token - _FIRST, _SIDE)
                one, two = divmod(pair, _SIDE)
                written += (_ALPHABET[one] + _ALPHABET[two] + _ALPHABET[three]).encode()
            elif token < _NUM_BYTES:
                written.append(token)
            elif not skip_special_tokens:
                written += self.added_tokens_decoder[token].content.encode()
        return written.decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self.decode([ids]) if isinstance(ids, int) else [self.decode([token]) for token in ids]


def _read(text: str) -> Iterator[int]:
    for piece in _PIECES.findall(text):
        if len(piece) == 3:
            yield _token(piece)
        elif piece in _SHOWN.values():
            yield IMAGE if piece == _SHOWN["image"] else VIDEO
        else:
            yield from piece.encode("utf-8", "surrogatepass")


class SyllableTemplate:
    """Chat template that renders each message as ``role: text``."""

    thinking = None
    tool_format = "hermes"

    def render(self, messages: Sequence[ChatMessage], options: PromptOptions) -> str:
        if options.tools:
            raise InvalidRequest("a model without weights cannot call tools; remove them", param="tools")
        texts = [f"{message.role}: {''.join(map(_shown, message.content))}" for message in messages]
        if options.add_generation_prompt:
            texts.append("assistant: ")
        return "\n".join(texts)


def _shown(part: Any) -> str:
    if part.type != "text":
        return _SHOWN[part.type]
    # text that looks like a placeholder must not become one
    text: str = part.text
    return text.translate(dict.fromkeys(map(ord, _SHOWN.values()), "?"))


class NoLogits(GenerationConfig):
    """Rejects options that need logits. Options that shape the distribution (top_p, penalties) have no effect."""

    def complete(self, sampling: SamplingParams) -> SamplingParams:
        for name in ("logit_bias", "allowed_token_ids", "bad_words", "logprobs", "grammar"):
            value = getattr(sampling, name)
            if value is not None and value not in ((), {}):
                param = value.param if name == "grammar" and value.param else name
                raise InvalidRequest(
                    f"{param}: not available for a model without weights, which computes no logits; remove it",
                    param=param,
                )
        return sampling
