"""Tokens have the bytes that they add to a text; a text that is too long for its context is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from epd_serve.demo import weights_dir
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.tokenizer import MAX_CHARACTERS, Tokenizer


@cache
def byte_level() -> Any:
    return AutoTokenizer.from_pretrained(weights_dir())


@cache
def sentencepiece() -> Any:
    """Like Llama's: single bytes where it knows no character."""
    pieces = ["<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁ab"]
    inner = Inner(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@cache
def whole_words() -> Any:
    inner = Inner(models.WordLevel({"<unk>": 0, "ab": 1, "é": 2}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece])
@given(text=st.text(max_size=20))
def test_the_bytes_of_tokens_make_the_text(tokenizer: Any, text: str) -> None:
    vocabulary = Tokenizer(tokenizer())
    ids = tokenizer().encode(text, add_special_tokens=False)
    expected = text.replace("▁", " ") if tokenizer is sentencepiece else text
    assert b"".join(map(vocabulary.bytes_of, ids)) == expected.encode()


@given(st.lists(st.integers(0, len(byte_level()) - 1), min_size=1, max_size=12))
def test_the_texts_of_tokens_make_the_text(ids: list[int]) -> None:
    """Where each has one; parts of characters and added tokens have none."""
    vocabulary = Tokenizer(byte_level())
    texts = [vocabulary.text_of(token_id) for token_id in ids]
    known = [token_id for token_id, text in zip(ids, texts, strict=True) if text is not None]
    assert "".join(filter(None, texts)) == vocabulary.decode(known, skip_special_tokens=True)
    assert vocabulary.text_of(2) is None, "<|im_end|>"


def test_tokens_whose_text_depends_on_their_neighbours_have_none_of_their_own() -> None:
    for tokenizer in (sentencepiece(), whole_words()):
        vocabulary = Tokenizer(tokenizer)
        assert {vocabulary.text_of(token_id) for token_id in range(len(tokenizer))} == {None}


def test_each_kind_of_token() -> None:
    qwen, llama, words = Tokenizer(byte_level()), Tokenizer(sentencepiece()), Tokenizer(whole_words())
    pieces = {qwen.bytes_of(token) for token in range(len(byte_level()))}
    assert {bytes([byte]) for byte in range(256)} <= pieces
    assert qwen.bytes_of(2) == b"<|im_end|>" and 2 in qwen.special_ids
    assert qwen.bytes_of(len(byte_level()) + 3) == b""  # models have rows for no token
    assert llama.bytes_of(2 + 0xE2) == b"\xe2" and llama.bytes_of(261) == b" ab" and llama.special_ids == {0}
    assert [words.bytes_of(token) for token in (1, 2)] == [b"ab", "é".encode()]


@pytest.mark.parametrize(
    ("num_characters", "num_tokens", "fits"),
    [
        (2048 * 8, 2048, True),
        (MAX_CHARACTERS, 1 << 16, True),
        (MAX_CHARACTERS + 1, 1 << 16, False),
        (8 << 20, 1 << 20, True),  # of a context of a million tokens
        ((8 << 20) + 1, 1 << 20, False),
        (100_000, 1, False),  # whatever its tokens are
    ],
)
def test_a_text_is_as_long_as_its_context_may_need(num_characters: int, num_tokens: int, fits: bool) -> None:
    bounded = Tokenizer(byte_level())
    if fits:
        bounded.check_length(num_characters, num_tokens, "prompt")
        return
    with pytest.raises(InvalidRequest) as refused:
        bounded.check_length(num_characters, num_tokens, "prompt")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
