"""Texts are read as the tokenizer reads them, unless they are too long for their context."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.tokenizer import MAX_CHARACTERS, Tokenizer

DEMO = AutoTokenizer.from_pretrained(weights_dir(), local_files_only=True)


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
    bounded = Tokenizer(DEMO)
    if fits:
        bounded.check_length(num_characters, num_tokens, "prompt")
        return
    with pytest.raises(InvalidRequest) as refused:
        bounded.check_length(num_characters, num_tokens, "prompt")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_a_text_waits_for_no_long_one() -> None:
    bounded, begun = Tokenizer(DEMO), threading.Event()
    text, expected = "apple pie " * (MAX_CHARACTERS // 10), DEMO.encode("hello")

    def read() -> list[int]:
        begun.set()
        return bounded.encode(text, add_special_tokens=True)

    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(read)
        begun.wait()
        for _ in range(5):
            assert bounded.encode("hello", add_special_tokens=True) == expected
        assert not long.done()
        assert long.result() == DEMO.encode(text)
