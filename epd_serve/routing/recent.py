"""A set that forgets its oldest keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Recent(Generic[T]):
    """The last ``capacity`` keys that were added."""

    __slots__ = ("_capacity", "_keys")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[T, None] = OrderedDict()

    def __contains__(self, key: T) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: T) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def discard(self, key: T) -> None:
        self._keys.pop(key, None)

    def forget_half(self) -> None:
        """Remove the half of the keys that was added first."""
        for _ in range(len(self._keys) // 2):
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()
