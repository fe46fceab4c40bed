"""Spellings of media tokens that a request brings become the characters that they are."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen2_5_VLConfig

from epd_serve.demo import weights_dir
from epd_serve.instance.text.chat_template import MediaLiterals
from epd_serve.instance.text.tokenizer import MARK

MEDIA = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
OTHERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
PIECES = st.sampled_from([*MEDIA, *OTHERS, "<|", "|>", "<|image_pad|", " red", "é ", "\n", "<\ue000|image_pad|>"])


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(weights_dir())


@cache
def literals() -> MediaLiterals:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer().convert_tokens_to_ids(MEDIA), strict=True))
    return MediaLiterals(tokenizer(), Qwen2_5_VLConfig(**ids))


@given(st.lists(st.tuples(st.booleans(), st.lists(PIECES, max_size=4).map("".join)), max_size=6))
def test_what_a_user_writes_is_text_and_what_a_template_writes_is_not(parts: list[tuple[bool, str]]) -> None:
    whole = "".join(text for _, text in parts)
    marked = iter(literals().marked({"role": [text for is_users, text in parts if is_users]})["role"])
    rendered = "".join(next(marked) if is_users else text for is_users, text in parts)
    ids = [one for piece in rendered.split(MARK) for one in tokenizer().encode(piece, add_special_tokens=False)]
    assert tokenizer().decode(ids, skip_special_tokens=False) == whole
    for name, token in zip(MEDIA, tokenizer().convert_tokens_to_ids(MEDIA), strict=True):
        assert ids.count(token) == rendered.count(name)
