"""A cache of features by mm_hash, held by the requests that need them, with LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: Entries without an owner in a cache whose values can be fetched again.
IDLE_FEATURES = 256


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    nbytes: int
    owners: set[str] = field(default_factory=set)


class FeatureCache(Generic[T]):
    """A cache of at most ``capacity_bytes``, which never evicts an entry with an owner. Not thread-safe.

    Owners are request ids; an owner holds an entry once, however often it acquires it.

    Args:
        capacity_bytes: exceeded only by ``put(..., beyond=True)``, until enough entries are released.
        max_idle: limit of the entries without an owner, so that new values do not fill the memory with stale ones.
    """

    def __init__(self, capacity_bytes: int, max_idle: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_idle = max_idle
        self.num_bytes = 0
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._held: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def num_owners(self) -> int:
        return len(self._held)

    def acquire(self, key: str, owner: str) -> T | None:
        """Hold an entry for ``owner`` and return its value, or None on a miss."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.owners.add(owner)
        self._held.setdefault(owner, set()).add(key)
        return entry.value

    def get(self, key: str) -> T | None:
        """Return the value without holding it or marking it as used."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def can_put(self, nbytes: int) -> bool:
        """Return whether a value fits once all entries without an owner are evicted."""
        held = sum(entry.nbytes for entry in self._entries.values() if entry.owners)
        return held + nbytes <= self.capacity_bytes

    def put(self, key: str, value: T, nbytes: int, owner: str, *, beyond: bool = False) -> list[T]:
        """Insert a value unless the key exists, and hold it for ``owner``; return the values evicted for it.

        Precondition: :meth:`can_put`, or ``beyond``.
        """
        evicted: list[T] = []
        if key not in self._entries:
            assert beyond or self.can_put(nbytes), f"{nbytes} bytes do not fit"
            evicted = self._evict_down_to(self.capacity_bytes - nbytes)
            self._entries[key] = _Entry(value, nbytes)
            self.num_bytes += nbytes
        self.acquire(key, owner)
        return evicted

    def evict_one(self) -> T | None:
        """Remove the least recently used entry without an owner; return its value, or None if there is none."""
        victim = next((key for key, entry in self._entries.items() if not entry.owners), None)
        if victim is None:
            return None
        entry = self._entries.pop(victim)
        self.num_bytes -= entry.nbytes
        return entry.value

    def release(self, owner: str, key: str | None = None) -> None:
        """Drop the owner's hold on ``key``, by default all of its holds. Idempotent."""
        held = self._held.get(owner, set())
        for name in list(held) if key is None else [key]:
            if name in held:
                held.remove(name)
                self._entries[name].owners.discard(owner)
        if not held:
            self._held.pop(owner, None)
        if self.num_bytes > self.capacity_bytes:
            self._evict_down_to(self.capacity_bytes)
        if self.max_idle is not None and len(self._entries) > self.max_idle:
            for _ in range(self._num_idle() - self.max_idle):
                self.evict_one()

    def check_integrity(self) -> None:
        """Raise AssertionError if bytes or holds are inconsistent."""
        assert self.num_bytes == sum(entry.nbytes for entry in self._entries.values()), "bytes do not add up"
        held = sum(entry.nbytes for entry in self._entries.values() if entry.owners)
        assert self.num_bytes <= max(self.capacity_bytes, held), "over capacity in spite of idle entries"
        assert self.max_idle is None or self._num_idle() <= self.max_idle, "too many idle entries"
        from_entries = {(owner, key) for key, entry in self._entries.items() for owner in entry.owners}
        from_owners = {(owner, key) for owner, keys in self._held.items() for key in keys}
        assert from_entries == from_owners, "holds disagree"
        assert all(self._held.values()), "an owner without a hold"

    def _num_idle(self) -> int:
        return sum(not entry.owners for entry in self._entries.values())

    def _evict_down_to(self, num_bytes: int) -> list[T]:
        evicted: list[T] = []
        while self.num_bytes > num_bytes and (value := self.evict_one()) is not None:
            evicted.append(value)
        return evicted
