"""Random bytes of the operating system, fetched many at a time: a request needs some, and each fetch is a system
call."""

from __future__ import annotations

import os
from collections import deque

_SIZE = 16
_FETCHED_AT_ONCE = 512

#: Taking a block out is atomic, so that no two threads get the same one.
_blocks: deque[bytes] = deque()
os.register_at_fork(after_in_child=_blocks.clear)


def random_block() -> bytes:
    """16 random bytes, as good as those of ``os.urandom``, that nobody else has got."""
    try:
        return _blocks.pop()
    except IndexError:
        data = os.urandom(_SIZE * _FETCHED_AT_ONCE)
        _blocks.extend(data[at : at + _SIZE] for at in range(_SIZE, len(data), _SIZE))
        return data[:_SIZE]
