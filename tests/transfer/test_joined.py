"""Memory that lies apart, written to as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.tcp import JoinedMemory
from epd_serve.transfer.transport import TransferError


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 30), st.integers(0, 30))
def test_what_is_cut_out_lies_in_one_part(sizes: list[int], start: int, length: int) -> None:
    parts = [bytes([number] * size) for number, size in enumerate(sizes)]
    whole = b"".join(parts)
    joined = JoinedMemory([memoryview(part) for part in parts])
    assert joined.nbytes == len(whole)
    found = bytes(joined[start : start + length])
    assert whole[start : start + length].startswith(found)
    if length and start < len(whole):
        assert len(found) == min(length, whole.count(whole[start]) - (start - whole.index(whole[start])))


def test_memory_without_bytes_is_refused() -> None:
    for buffers in ([], [memoryview(b"a"), memoryview(b"")]):
        with pytest.raises(ValueError, match="not empty"):
            JoinedMemory(buffers)


def test_one_write_reaches_all_parts_and_none_goes_across() -> None:
    here, there = EmbeddedTransport(), EmbeddedTransport()
    parts = [bytearray(4), bytearray(4)]
    region = here.offer("kv", [memoryview(part) for part in parts])
    there.write(region, [(2, memoryview(b"ab")), (4, memoryview(b"cd"))])
    assert parts == [b"\0\0ab", b"cd\0\0"]
    data = bytearray(3)
    there.read(region, [(4, memoryview(data))])
    assert data == b"cd\0"
    with pytest.raises(TransferError, match="outside region"):
        there.write(region, [(3, memoryview(b"xy"))])
    assert parts == [b"\0\0ab", b"cd\0\0"]
    there.close()
    here.close()
