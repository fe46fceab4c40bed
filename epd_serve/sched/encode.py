"""Batching of encodes under an image budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class EncodeGate:
    """Lets no new encode start while prompts are computed (HydraInfer, Algorithm 1), up to a time.

    Prompts that never end must not starve images, of which some of them may be waiting for.
    """

    def __init__(
        self, is_prefilling: Callable[[], bool], clock: Callable[[], float], *, patience_s: float = 1.0
    ) -> None:
        self._is_prefilling = is_prefilling
        self._clock = clock
        self._patience_s = patience_s
        self._held_since: float | None = None

    def may_start(self) -> bool:
        """Whether an encode that is waiting may start now; to be asked again soon where not."""
        now = self._clock()
        if self._is_prefilling():
            if self._held_since is None:
                self._held_since = now
            if now - self._held_since < self._patience_s:
                return False
        self._held_since = None
        return True
