"""Room for bodies, which behaves as any bytearray does."""

import pytest

from proxy.http.arrival import buffer


@pytest.mark.parametrize("size", [0, 1, 32 * 1024 - 1, 32 * 1024, 5_000_001])
def test_room_has_its_size_and_keeps_what_is_written(size):
    room = buffer(size)
    assert len(room) == size
    with memoryview(room) as view:
        view[:] = b"x" * size
    assert room == b"x" * size
    room.clear()
    assert room == b""
