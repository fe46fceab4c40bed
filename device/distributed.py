"""Groups of devices that compute one model together: the collectives that tensor parallelism needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Group(Protocol):
    """The ranks of one tensor-parallel instance; all of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, on every rank; ``partial`` may be overwritten."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' parts, of one shape, side by side along the last dimension."""
        ...


class Alone:
    """Fills the Group protocol for an instance on one device: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part
