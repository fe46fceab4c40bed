"""Batching of encodes under an image budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Encodable(Protocol):
    @property
    def num_pixels(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Encodable)


def schedule_encodes(waiting: Iterable[ItemT], max_num_pixels: int) -> list[ItemT]:
    """The longest prefix of ``waiting`` within the budget, in pixels; one item at least, however large."""
    batch: list[ItemT] = []
    pixels = 0
    for item in waiting:
        if batch and pixels + item.num_pixels > max_num_pixels:
            break
        batch.append(item)
        pixels += item.num_pixels
    return batch
