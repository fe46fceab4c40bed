"""Features by content hash, held for the requests that need them, evicted least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: Entries that nobody holds, of a cache whose values can be had again from where they came.
IDLE_FEATURES = 256


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    nbytes: int
    owners: set[str] = field(default_factory=set)


class FeatureCache(Generic[T]):
    """A cache of at most ``capacity_bytes`` of values. An entry with an owner is never evicted. Not thread-safe.

    The one exception: ``put(..., beyond=True)`` goes beyond the capacity where held entries leave no room; entries
    that are released then are dropped until all fits again.

    ``max_idle`` bounds the entries without an owner by their number, too, so that a load of ever new values does
    not fill the capacity with entries that nobody asks for again.

    An owner is a request id: it holds an entry once however often it asks, and :meth:`release` drops all it holds.
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
        """The value, now held by ``owner`` too; None on a miss."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.owners.add(owner)
        self._held.setdefault(owner, set()).add(key)
        return entry.value

    def get(self, key: str) -> T | None:
        """The value without a new hold; not a use that keeps it from being evicted."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def is_held(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and bool(entry.owners)

    def can_put(self, nbytes: int) -> bool:
        """Whether evicting what nobody holds would make room."""
        held = sum(entry.nbytes for entry in self._entries.values() if entry.owners)
        return held + nbytes <= self.capacity_bytes

    def put(self, key: str, value: T, nbytes: int, owner: str, *, beyond: bool = False) -> list[T]:
        """Insert a value held by ``owner``, if the key is not there; return the values evicted to make room.

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

    def evict(self, key: str) -> T:
        """Drop an entry that nobody holds and return its value."""
        assert not self._entries[key].owners, f"{key} is held"
        entry = self._entries.pop(key)
        self.num_bytes -= entry.nbytes
        return entry.value

    def discard(self, key: str) -> list[str]:
        """Drop an entry together with its holds; return the owners. Idempotent."""
        owners = sorted(self._entries[key].owners) if key in self._entries else []
        for owner in owners:
            self.release(owner, key)
        if key in self._entries:
            self.evict(key)
        return owners

    def evict_one(self) -> T | None:
        """Drop the least recently used entry that nobody holds; None where every entry is held."""
        victim = next((key for key, entry in self._entries.items() if not entry.owners), None)
        return None if victim is None else self.evict(victim)

    def release(self, owner: str, key: str | None = None) -> None:
        """Drop the owner's hold on ``key``, or on everything. Unknown owners and keys are fine (idempotent)."""
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
        """Raise AssertionError unless bytes and holds add up from both sides."""
        assert self.num_bytes == sum(entry.nbytes for entry in self._entries.values()), "bytes do not add up"
        held = sum(entry.nbytes for entry in self._entries.values() if entry.owners)
        assert self.num_bytes <= max(self.capacity_bytes, held), "over capacity with entries that nobody holds"
        assert self.max_idle is None or self._num_idle() <= self.max_idle, "too many entries that nobody holds"
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
