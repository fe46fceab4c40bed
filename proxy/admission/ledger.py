"""The use of API keys at all workers of a gateway together: numbers in shared memory."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from epd_serve.config.gateway import KeyLimits
from proxy.admission.keys import Client

#: Keys with limits, each with every change of these: far more than a gateway reads from a file.
CAPACITY = 65536
_TAG_BYTES = 16
_HEAD = struct.Struct("=Q")
_BUCKETS = struct.Struct("=dddd")
_COUNT = struct.Struct("=I")


def _account_bytes(num_workers: int) -> int:
    """Padded, so that the levels of the next one are aligned."""
    return _TAG_BYTES + _BUCKETS.size + _COUNT.size * (num_workers + num_workers % 2)


class Ledger:
    """One account for each API key with limits, in a file in memory that all workers have mapped.

    An account is locked while it is read and written, by POSIX record locks: who dies with one gives it back. It
    takes some microseconds; accounts of different keys do not meet. One thread alone may lock accounts, and one at
    a time: such a lock belongs to the process, and the kernel refuses (EDEADLK) what would be a deadlock if all of
    a process waited for what one of its threads waits for. :meth:`writing` has another kind of lock therefore.

    ::

        number of accounts | tag, two buckets (level, time), requests in progress at each worker | ...
    """

    def __init__(self, descriptor: int, num_workers: int, index: int | None = None) -> None:
        """``index`` of the worker; None for the parent, which has no requests. The descriptor stays open: to close
        any one of a file gives up the process's locks."""
        self._descriptor = descriptor
        self._num_workers = num_workers
        self._index = index
        self._size = _account_bytes(num_workers)
        self._memory = mmap.mmap(descriptor, _HEAD.size + CAPACITY * self._size)
        self._known: dict[bytes, int] = {}
        self._log_lock = threading.Lock()
        self._log: int | None = None

    @classmethod
    def create(cls, num_workers: int) -> tuple[int, Ledger]:
        """(descriptor for workers to inherit, the parent's view)."""
        descriptor = os.memfd_create("epd-serve-keys")
        # Sparse: pages are there once they are written.
        os.ftruncate(descriptor, _HEAD.size + CAPACITY * _account_bytes(num_workers))
        return descriptor, cls(descriptor, num_workers)

    def client(self, name: str, key_hash: str, limits: KeyLimits) -> Client:
        """The holder of a key; one without limits that workers must share needs no account.

        Raises ValueError where there is no room for another account.
        """
        shared = (limits.requests_per_s, limits.tokens_per_min, limits.max_concurrent)
        if all(limit is None for limit in shared):
            return Client(name, limits)
        tag = blake2b(repr((key_hash, name, limits)).encode(), digest_size=_TAG_BYTES).digest()
        return SharedClient(name, limits, self, tag)

    def forget(self, index: int) -> None:
        """Worker ``index`` is dead: it has no requests in progress any more."""
        for number in range(self._number()):
            with self.locked(number):
                self._set(number, index, 0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """To the access log, which all workers share; any thread. Raises OSError."""
        with self._log_lock:
            if self._log is None:  # a file description of this process's own, which is what flock() goes by
                self._log = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._log, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._log, fcntl.LOCK_UN)

    def account(self, tag: bytes, levels: tuple[float, ...]) -> int:
        """The number of the account of that tag; a new one begins with ``levels``. Raises ValueError for one too
        many."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 0)
        try:
            for number in range(len(self._known), self._number()):
                at = self._at(number)
                self._known[self._memory[at : at + _TAG_BYTES]] = number
            if tag in self._known:
                return self._known[tag]
            number = len(self._known)
            if number == CAPACITY:
                raise ValueError(
                    f"gateway.api_keys: limits of {CAPACITY} keys, old ones included, are counted already; start "
                    "the gateway again"
                )
            at = self._at(number)
            self._memory[at : at + _TAG_BYTES] = tag
            self.set_levels(number, levels)
            _HEAD.pack_into(self._memory, 0, number + 1)
            self._known[tag] = number
            return number
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)

    # ------------------------------------------------------------------ of one account, by its number

    @contextmanager
    def locked(self, number: int) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 1 + number)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 1 + number)

    def levels(self, number: int) -> tuple[float, ...]:
        return _BUCKETS.unpack_from(self._memory, self._at(number) + _TAG_BYTES)

    def set_levels(self, number: int, levels: tuple[float, ...]) -> None:
        _BUCKETS.pack_into(self._memory, self._at(number) + _TAG_BYTES, *levels)

    def num_active(self, number: int) -> int:
        """Choices in progress at all workers."""
        at = self._at(number) + _TAG_BYTES + _BUCKETS.size
        return sum(struct.unpack_from(f"={self._num_workers}I", self._memory, at))

    def add_active(self, number: int, change: int) -> None:
        """At this worker."""
        assert self._index is not None
        (now,) = _COUNT.unpack_from(self._memory, self._count_at(number, self._index))
        self._set(number, self._index, now + change)

    # ------------------------------------------------------------------ inside

    def _number(self) -> int:
        number: int = _HEAD.unpack_from(self._memory, 0)[0]
        return number

    def _at(self, number: int) -> int:
        return _HEAD.size + number * self._size

    def _count_at(self, number: int, index: int) -> int:
        return self._at(number) + _TAG_BYTES + _BUCKETS.size + 4 * index

    def _set(self, number: int, index: int, value: int) -> None:
        _COUNT.pack_into(self._memory, self._count_at(number, index), value)


class SharedClient(Client):
    """The holder of a key whose limits hold for all workers together."""

    __slots__ = ("_account", "_ledger")

    def __init__(self, name: str, limits: KeyLimits, ledger: Ledger, tag: bytes) -> None:
        """``tag`` is that of its account."""
        super().__init__(name, limits)
        self._ledger = ledger
        self._account = ledger.account(tag, self.levels())

    def levels(self) -> tuple[float, ...]:
        """(level, time) of the buckets of requests and of tokens."""
        found: list[float] = []
        for bucket in (self.requests, self.tokens):
            found += (0.0, -math.inf) if bucket is None else (bucket.level, bucket.updated_s)
        return tuple(found)

    def enter(self, now_s: float) -> None:
        with self._open():
            super().enter(now_s)
            self._ledger.add_active(self._account, 1)

    def widen(self, num_choices: int) -> None:
        if num_choices > 1:
            with self._ledger.locked(self._account):
                super().widen(num_choices)
                self._ledger.add_active(self._account, num_choices - 1)

    def leave(self, num_choices: int = 1) -> None:
        super().leave(num_choices)
        with self._ledger.locked(self._account):
            self._ledger.add_active(self._account, -num_choices)

    def charge(self, num_tokens: float, now_s: float) -> None:
        with self._open():
            super().charge(num_tokens, now_s)

    def refund(self, num_tokens: float) -> None:
        with self._open():
            super().refund(num_tokens)

    def num_tokens_left(self, now_s: float) -> float:
        with self._open():
            return super().num_tokens_left(now_s)

    def num_everywhere(self) -> int:
        return self._ledger.num_active(self._account)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """The buckets as they are now; what is changed in them is written back."""
        with self._ledger.locked(self._account):
            levels = self._ledger.levels(self._account)
            for bucket, state in ((self.requests, levels[:2]), (self.tokens, levels[2:])):
                if bucket is not None:
                    bucket.level, bucket.updated_s = state
            try:
                yield
            finally:
                self._ledger.set_levels(self._account, self.levels())
