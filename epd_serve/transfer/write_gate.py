"""Fencing of writes that reach this process over a connection.

A writer on another host may be stopped after its look at the lease, or its bytes may lie unread in a socket of
this process while that is stopped: they come when the lease is over and the blocks are somebody else's. So a write
names the transfers that it is for, and the thread that receives it lets no byte into memory before the gate has
let it in. Once a transfer is shut out nothing of it begins any more, and what is inside is known: its blocks are
kept until it has left, and who sends nothing for a while is cut off.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class WriteGate:
    """The transfers that may write here, and those that are writing at this moment. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._inside: Counter[str] = Counter()

    def open(self, transfer_id: str) -> None:
        with self._lock:
            self._open.add(transfer_id)

    def shut(self, transfer_id: str) -> None:
        """Let no more writes of the transfer in; a write that is inside goes on. Idempotent."""
        with self._lock:
            self._open.discard(transfer_id)

    def is_inside(self, transfer_id: str) -> bool:
        with self._lock:
            return transfer_id in self._inside

    @contextmanager
    def passing(self, transfer_ids: Sequence[str]) -> Iterator[bool]:
        """Yield whether a write for these transfers may go on.

        They count as inside until the ``with`` block ends.
        """
        with self._lock:
            may_pass = self._open.issuperset(transfer_ids)
            if may_pass:
                self._inside.update(transfer_ids)
        try:
            yield may_pass
        finally:
            if may_pass:
                with self._lock:
                    self._inside.subtract(transfer_ids)
                    self._inside = +self._inside  # without those at zero
