"""Texts of a model without weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import InvalidRequest
from epd_serve.instance.loading.shape_model import MEAN_ANSWER_TOKENS, next_token
from epd_serve.instance.text.syllables import (
    END,
    IMAGE,
    NUM_TOKENS,
    NoLogits,
    SyllableTemplate,
    SyllableTokenizer,
)
from epd_serve.instance.text.tokenizer import Detokenizer, Tokenizer
from epd_serve.protocol.wire import ChatMessage, Part, PromptOptions
from epd_serve.types import Grammar, SamplingParams

TOKENIZER = SyllableTokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" abc,.?!")))
def test_a_text_is_read_and_written_as_it_is(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(0 <= token < NUM_TOKENS for token in ids)
    assert TOKENIZER.decode(ids) == text
    detokenizer = Detokenizer(Tokenizer(TOKENIZER), [], skip_special_tokens=False)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text


def test_a_chat_has_a_placeholder_for_each_picture_and_for_nothing_else() -> None:
    parts = [Part("image"), Part("text", "what \N{OBJECT REPLACEMENT CHARACTER} is it"), Part("image")]
    text = SyllableTemplate().render([ChatMessage("user", parts)], PromptOptions())
    assert text.startswith("user: ") and text.endswith("\nassistant: ")
    assert TOKENIZER.encode(text).count(IMAGE) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (3,)},
        {"bad_words": ("no",)},
        {"grammar": Grammar(kind="regex", text="a", param="guided_regex")},
    ],
)
def test_what_needs_logits_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="without weights"):
        NoLogits().complete(SamplingParams(seed=1, **fields))  # type: ignore[arg-type]


def test_one_of_many_tokens_ends_an_answer_that_may_end() -> None:
    ended = sum(next_token(str(i).encode(), SamplingParams(seed=i), 0, 5) == END for i in range(20_000))
    assert 0.8 < ended * MEAN_ANSWER_TOKENS / 20_000 < 1.2
    for sampling in (SamplingParams(seed=1, ignore_eos=True), SamplingParams(seed=1, min_tokens=6)):
        assert not any(next_token(str(i).encode(), sampling, 0, 5) == END for i in range(2000))
