"""Messages are whole wherever they are cut, and what is none ends the link."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.rpc.link import LinkClosed, Messages, pack


class Words(msgspec.Struct, frozen=True, tag=True):
    text: str


class Bulk(msgspec.Struct, frozen=True, tag=True):
    data: bytes


Message = Words | Bulk
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


@given(cuts=st.lists(st.integers(1, 200), min_size=1), texts=st.lists(st.text(max_size=90), min_size=1))
def test_messages_are_whole_wherever_they_are_cut(cuts: list[int], texts: list[str]) -> None:
    data = b"".join(pack(Words(text)) for text in texts)
    messages, found, at = Messages(DECODER), list[Message](), 0
    while at < len(data):
        cut = cuts[at % len(cuts)]
        found += messages.take(data[at : at + cut])
        at += cut
    assert found == [Words(text) for text in texts]


def test_a_large_message_comes_in_pieces() -> None:
    data, messages = bytes(pack(Bulk(bytes(1 << 20)))), Messages(DECODER)
    found = [one for at in range(0, len(data), 70_000) for one in messages.take(data[at : at + 70_000])]
    assert found == [Bulk(bytes(1 << 20))]


@pytest.mark.parametrize("data", [struct.pack("<I", 1001), struct.pack("<I", 3) + b"\xc1ab"])
def test_what_is_no_message_ends_the_link(data: bytes) -> None:
    with pytest.raises(LinkClosed):
        Messages(DECODER, max_bytes=1000).take(data)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="1000 are the limit"):
        pack(Bulk(bytes(2000)), max_bytes=1000)
