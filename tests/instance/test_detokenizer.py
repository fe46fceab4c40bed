"""Text comes out piece by piece as it would in one piece, never half a character, never past a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from epd_serve.demo import weights_dir
from epd_serve.instance.detokenizer import Detokenizer


class Bytes:
    """A tokenizer whose tokens are single bytes: the worst case for characters of several bytes."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def pieces(text: str, stop: Sequence[str] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Bytes(), list(b"prompt "), stop)
    out = []
    for byte in text.encode():
        out.append(detokenizer.push(byte))
        if detokenizer.stopped:
            return out, detokenizer
    out.append(detokenizer.flush())
    return out, detokenizer


@given(st.text(max_size=40).filter(lambda text: "\ufffd" not in text))
def test_pieces_make_the_whole(text: str) -> None:
    out, detokenizer = pieces(text)
    assert "".join(out) == text == detokenizer.text
    assert all("\ufffd" not in piece for piece in out)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings(text: str, stop: list[str]) -> None:
    out, detokenizer = pieces(text, stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if ends:
        first_complete = text[: min(ends)]
        expected = text[: min(first_complete.find(s) for s in stop if s in first_complete)]
    else:
        expected = text
    assert "".join(out) == expected == detokenizer.text
    assert detokenizer.stopped == bool(ends)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(Bytes(), [], ["STOP"])
    assert [detokenizer.push(byte) for byte in b"aSTO"] == ["a", "", "", ""]
    assert detokenizer.push(ord("x")) == "STOx"


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("text", ["a red circle and a blue square", "1 2 3 4", "héllo wörld ✓ 日本"])
def test_with_a_real_tokenizer(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("What is this?"))
    assert "".join([detokenizer.push(i) for i in ids] + [detokenizer.flush()]) == tokenizer.decode(ids)


def test_a_stop_string_within_min_tokens_stops_nothing() -> None:
    detokenizer = Detokenizer(Bytes(), [], ["b", "cd"], min_tokens=3)
    assert "".join(detokenizer.push(byte) for byte in b"abc") == "ab"
    assert not detokenizer.stopped
    assert detokenizer.push(ord("d")) == ""
    assert detokenizer.stopped
    assert detokenizer.text == "ab"


def test_tokens_that_are_not_shown_cost_nothing_later() -> None:
    decoded: list[int] = []

    class Counting(Bytes):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(token_ids))
            return super().decode([i for i in token_ids if i != 0], skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting(), list(b"prompt"))
    assert {detokenizer.push(0) for _ in range(500)} == {""}
    assert max(decoded) < 10
    assert detokenizer.push(ord("x")) == "x"
