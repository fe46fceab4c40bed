"""Ids of ended things, remembered for a while: late messages for them must not start them anew."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Tombstones(Generic[V]):
    """The newest ``capacity`` ids, each with the value of its end. An id keeps its first value and its place."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._values: OrderedDict[str, V] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> V | None:
        return self._values.get(name)

    def add(self, name: str, value: V) -> None:
        self._values.setdefault(name, value)
        while len(self._values) > self._capacity:
            self._values.popitem(last=False)
