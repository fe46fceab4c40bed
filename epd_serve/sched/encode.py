"""Encodes: batches under an image budget, and features that are handed on together."""

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


class HandoffBatcher:
    """Holds the ready items of each receiver until there are ``size``, or ``timeout_s`` after the first.

    So prompts that wait for features come to the language model together and fill its steps. For one thread.

    Args:
        call_later: runs a function after a number of seconds.
    """

    def __init__(
        self, size: int, timeout_s: float, call_later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        if size < 1 or not timeout_s > 0:
            raise ValueError(
                f"{size} features within {timeout_s} s are no batch; it has one, and more time than 0"
            )
        self.size = size
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._open: dict[str, dict[object, Callable[[], None]]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._open.values()))

    def join(self, receiver: str, go: Callable[[], None]) -> object:
        """Add an item; ``go`` is called with its batch, at once if the item completes it.

        Returns a ticket for :meth:`leave`.
        """
        ticket = object()
        if self.size == 1:
            go()
            return ticket
        batch = self._open.get(receiver)
        if batch is None:
            batch = self._open[receiver] = {}
            self._call_later(self._timeout_s, lambda: self._send(receiver, batch))
        batch[ticket] = go
        if len(batch) == self.size:
            self._send(receiver, batch)
        return ticket

    def leave(self, receiver: str, ticket: object) -> None:
        """Drop an item that is wanted no more. Idempotent."""
        self._open.get(receiver, {}).pop(ticket, None)

    def _send(self, receiver: str, batch: dict[object, Callable[[], None]]) -> None:
        if self._open.get(receiver) is not batch:
            return  # it was full before its time
        del self._open[receiver]
        for go in batch.values():
            go()
