"""Text comes out piece by piece as it would in one piece, never half a character, never past a stop string."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.instance.text.tokenizer import Detokenizer


class Bytes:
    """A tokenizer whose tokens are single bytes: the worst case for characters of several bytes."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def text_of(self, token_id: int) -> str | None:
        return chr(token_id) if 0 < token_id < 0x80 else None


class Hidden(Bytes):
    """Token 0 is not shown."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return super().decode([i for i in token_ids if i != 0], skip_special_tokens=skip_special_tokens)


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


class Texts:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.texts[token_id] for token_id in token_ids)

    def text_of(self, token_id: int) -> str | None:
        return self.texts[token_id]


class ByDefinition:
    """Stop strings as they are defined, a whole text at a time."""

    def __init__(self, stop: Sequence[str], min_tokens: int, include_stop: bool) -> None:
        self.stop, self.min_tokens, self.include_stop = stop, min_tokens, include_stop
        self.read = self.text = ""
        self.num_tokens, self.stopped = 0, False

    def push(self, new: str) -> str:
        before, self.read = len(self.read), self.read + new
        self.num_tokens += 1
        found = [
            (start, -len(stop))
            for stop in self.stop
            for start in range(len(self.read))
            if self.read.startswith(stop, start) and start + len(stop) > before
        ]
        if found and self.num_tokens > self.min_tokens:
            start, length = min(found)
            text, self.stopped = self.read[: start - length if self.include_stop else start], True
        else:
            begun = [
                count
                for stop in self.stop
                for count in range(1, len(stop))
                if count <= len(self.read) and self.read.endswith(stop[:count])
            ]
            text = self.read[: len(self.read) - max(begun, default=0)]
        news, self.text = text[len(self.text) :], text
        return news


LETTERS = st.text("ab", min_size=1, max_size=6)


@given(
    st.lists(LETTERS, max_size=20),
    st.lists(LETTERS, max_size=5),
    st.integers(0, 4),
    st.booleans(),
)
def test_stop_strings_are_found_as_they_are_defined(
    texts: list[str], stop: list[str], min_tokens: int, include_stop: bool
) -> None:
    expected = ByDefinition(stop, min_tokens, include_stop)
    detokenizer = Detokenizer(Texts(texts), [], stop, min_tokens=min_tokens, include_stop=include_stop)
    for token_id, text in enumerate(texts):
        assert detokenizer.push(token_id) == expected.push(text)
        assert (detokenizer.text, detokenizer.stopped) == (expected.text, expected.stopped)
        if expected.stopped:
            return
    assert detokenizer.num_read == len(expected.read)
    assert expected.text + detokenizer.flush() == expected.read


class Fallback:
    """Bytes as SentencePiece has them: a run of byte tokens is text as a whole, or a mark for each of them."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(token_ids)

    def text_of(self, token_id: int) -> str | None:
        return None


@given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE4, 0xB8, 0xF0, 0x9F, 0x98]), min_size=20, max_size=90))
def test_bytes_that_make_no_character_come_out_as_they_would_in_one_piece(ids: list[int]) -> None:
    detokenizer = Detokenizer(Bytes(), [])
    text = "".join([detokenizer.push(byte) for byte in ids] + [detokenizer.flush()])
    assert text == bytes(ids).decode("utf-8", "replace") == detokenizer.text


@pytest.mark.parametrize(
    ("decoder", "token", "is_shown"), [(Bytes(), 0x80, True), (Fallback(), 0x80, True), (Hidden(), 0, False)]
)
def test_tokens_that_make_no_character_are_decoded_a_few_at_a_time(
    decoder: Bytes | Fallback, token: int, is_shown: bool
) -> None:
    decoded: list[int] = []

    class Counting:
        text_of = decoder.text_of

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(token_ids))
            return decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting(), [])
    pieces = [detokenizer.push(token) for _ in range(500)]
    assert max(decoded) < 40
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 500 * is_shown
    if is_shown:
        assert all("".join(pieces[at : at + 20]) for at in range(0, 480, 20)), "they are shown now and then"


def test_long_stop_strings_that_almost_match_hold_nothing_up() -> None:
    detokenizer = Detokenizer(Texts(["a" * 1000, "ca"]), [], ["a" * 500_000 + end for end in "bdefghij"])
    began = time.process_time()
    for _ in range(300):
        assert detokenizer.push(0) == ""
    assert detokenizer.push(1) == "a" * 300_000 + "c"
    assert time.process_time() - began < 4
