"""Texts are read in pieces with the same tokens, no further than the context reaches, and while somebody waits."""

from __future__ import annotations

import threading
import time
import tracemalloc
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from epd_serve.demo import weights_dir
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text import tokenizer as text_tokenizer
from epd_serve.instance.text.tokenizer import MAX_UNCUT_CHARACTERS, PIECE_CHARACTERS, BoundedTokenizer

CORPUS = [
    "The quick brown fox doesn't jump; it's 1234567 o'clock.\n\n  'Twas  brillig ",
    "def f(x):\n    return x + 1  # comment\r\n\tend",
    "你好，世界。今天天气很好！ こんにちは、元気ですか？ 안녕하세요 세계 한국어",
    "éàü e\u0301 \u1112\u1161\u11ab naïve café",
] * 3


def byte_level(split: str | None, *, normal: bool = False, bos: bool = False, digits: bool = False) -> Any:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normal:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|a|>", "<|b|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|a|> $A <|b|>", special_tokens=[("<|a|>", 0), ("<|b|>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


LLAMA, QWEN = sorted(text_tokenizer._KNOWN_SPLITS, key=len, reverse=True)
DEMO = AutoTokenizer.from_pretrained(weights_dir(), local_files_only=True)
TOKENIZERS = {
    "demo": DEMO,
    "gpt-2": byte_level(None),
    "llama 3": byte_level(LLAMA, bos=True),
    "qwen": byte_level(QWEN, normal=True),
    "digits": byte_level(None, digits=True, bos=True),
}
LETTERS = "aZé1 \n\r\t'sSlLdD.,;-_你好。，！のー・ア한국\u0301\u3099\u1161\u11ab\u00a0\u3000<|>b"
WORDS = [*CORPUS, "<|a|>", " ", "\n", "'ll", "x", "7", "。", "e\u0301"]
TEXTS = st.text(st.sampled_from(LETTERS), max_size=120) | st.lists(st.sampled_from(WORDS), max_size=9).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, add=st.booleans(), split=st.booleans())
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str, add: bool, split: bool) -> None:
    tokenizer = TOKENIZERS[name]
    bounded = BoundedTokenizer(tokenizer)
    assert bounded._affixes is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_tokenizer, "PIECE_CHARACTERS", 3)
        patch.setattr(text_tokenizer, "_LONG_PIECE_CHARACTERS", 9)
        patch.setattr(text_tokenizer, "_PAUSE_S", 0)
        whole = tokenizer.encode(text, add_special_tokens=add, split_special_tokens=split)
        read = bounded.encode(text, add_special_tokens=add, split_special_tokens=split, max_tokens=10**6)
        assert read == whole
        bounded.check_length(len(text), max(len(whole), 1), "prompt")


def other(change: str) -> Any:
    """A tokenizer of which nothing is known, or for which the proof does not hold."""
    if change == "no split":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if change == "another split":
        return byte_level(r"\w+ \w+|\s+|.")
    tokenizer = byte_level(None)
    if change == "a token with a space":
        tokenizer.add_tokens(["brown fox"])
    elif change == "a token that takes spaces":
        tokenizer.add_tokens([AddedToken("<mask>", rstrip=True)])
    else:
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    return tokenizer


@pytest.mark.parametrize(
    "change",
    ["no split", "another split", "a token with a space", "a token that takes spaces", "another normalizer"],
)
def test_other_tokenizers_read_in_one_piece(change: str) -> None:
    tokenizer = other(change)
    bounded, text = BoundedTokenizer(tokenizer), "The quick brown fox " * (PIECE_CHARACTERS // 10)
    assert bounded._affixes is None
    whole = tokenizer.encode(text)
    assert bounded.encode(text, add_special_tokens=True, max_tokens=9) == whole
    with pytest.raises(InvalidRequest, match="at most 1048576"):
        bounded.encode("x" * (MAX_UNCUT_CHARACTERS + 1), add_special_tokens=True, max_tokens=9)


def test_a_text_is_read_no_further_than_the_context_reaches() -> None:
    bounded, text = BoundedTokenizer(DEMO), "apple pie " * 10**6
    started = time.process_time()
    assert len(bounded.encode(text, add_special_tokens=True, max_tokens=2048)) > 2048
    with pytest.raises(InvalidRequest, match="without a place"):
        bounded.encode("a" * (MAX_UNCUT_CHARACTERS + 1), add_special_tokens=True, max_tokens=10**9)
    assert time.process_time() - started < 5, "the whole takes more than 20 s"


def test_a_text_that_cannot_fit_is_not_looked_at() -> None:
    bounded = BoundedTokenizer(DEMO)
    bounded.check_length(2048 * bounded.longest, 2048, "prompt")
    with pytest.raises(InvalidRequest, match="60000000 characters; the context holds 2048 tokens") as refused:
        bounded.check_length(60_000_000, 2048, "prompt")
    assert refused.value.code == "context_length_exceeded"


def test_nobody_waits_for_a_long_text_and_it_ends_when_it_is_given_up() -> None:
    bounded, gone = BoundedTokenizer(DEMO), threading.Event()

    def check() -> None:
        if gone.is_set():
            raise CancelledError

    text = "apple pie " * 10**6
    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(bounded.encode, text, add_special_tokens=True, max_tokens=10**9, check=check)
        for _ in range(5):
            assert bounded.encode("hello", add_special_tokens=True, max_tokens=9) == DEMO.encode("hello")
        assert not long.done()
        gone.set()
        with pytest.raises(CancelledError):
            long.result(60)


def test_memory_stays_near_that_of_the_tokens() -> None:
    bounded = BoundedTokenizer(DEMO)
    tracemalloc.start()
    try:
        ids = bounded.encode("apple pie " * 50_000, add_special_tokens=True, max_tokens=10**9)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(ids) + (8 << 20)
    finally:
        tracemalloc.stop()
