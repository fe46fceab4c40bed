"""A bounded set of the latest keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


class Recent(OrderedDict[T, None]):
    """The last ``capacity`` keys added."""

    def __init__(self, capacity: int = 4096) -> None:
        super().__init__()
        self._capacity = capacity

    def add(self, key: T) -> None:
        self[key] = None
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)
