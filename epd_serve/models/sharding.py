"""The part of a language model's weights that each tensor-parallel rank holds (Megatron-LM paper, section 3).

Projections that feed a layer's inner width are split by rows, so that each rank has whole heads and whole neurons;
those that lead back are split by columns, and their partial sums are added over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from device.distributed import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The attention heads of one rank. Where there are fewer KV heads than ranks, several ranks keep the same."""

    first_query: int
    num_query: int
    first_kv: int
    num_kv: int

    @classmethod
    def of_rank(cls, num_query_heads: int, num_kv_heads: int, group: Group) -> Heads:
        """Raises ValueError where whole heads cannot be given to every rank."""
        size = group.size
        check_heads(num_query_heads, num_kv_heads, size)
        num_query, kv = num_query_heads // size, kv_heads(num_kv_heads, group.rank, size)
        return cls(first_query=group.rank * num_query, num_query=num_query, first_kv=kv.start, num_kv=len(kv))

    def query_rows(self, head_dim: int) -> slice:
        """Rows of the query projection, and columns of the output projection."""
        return _range(self.first_query * head_dim, self.num_query * head_dim)

    def kv_rows(self, head_dim: int) -> slice:
        """Rows of the key and of the value projection."""
        return _range(self.first_kv * head_dim, self.num_kv * head_dim)


def kv_heads(num_kv_heads: int, rank: int, size: int) -> range:
    """The KV heads that a rank of so many keeps."""
    first = rank * num_kv_heads // size
    return range(first, first + max(num_kv_heads // size, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCopy:
    """KV heads that a rank of one instance copies to a rank of another.

    Attributes:
        rank: there. source, target: the first head's number among those of the rank here, and of that there.
    """

    rank: int
    source: int
    target: int
    count: int


def head_copies(num_kv_heads: int, rank: int, size: int, other_size: int) -> list[HeadCopy]:
    """A rank's copies by which all ranks of another width get their heads, each from the first that has it."""
    own = kv_heads(num_kv_heads, rank, size)
    if rank and kv_heads(num_kv_heads, rank - 1, size) == own:
        return []  # an earlier rank has the same
    copies: list[HeadCopy] = []
    for other in range(other_size):
        there = kv_heads(num_kv_heads, other, other_size)
        first, stop = max(own.start, there.start), min(own.stop, there.stop)
        if first < stop:
            copies.append(
                HeadCopy(rank=other, source=first - own.start, target=first - there.start, count=stop - first)
            )
    return copies


def split(width: int, group: Group) -> slice:
    """One rank's equal part of a width. Raises ValueError where it cannot be divided."""
    check_width(width, group.size)
    part = width // group.size
    return _range(group.rank * part, part)


def check_heads(num_query_heads: int, num_kv_heads: int, size: int) -> None:
    """Raise ValueError where whole heads cannot be given to each of ``size`` ranks."""
    if num_query_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(
            f"{num_query_heads} query and {num_kv_heads} KV heads cannot be split over {size} devices: the "
            "width must divide the query heads, and be a divisor or a multiple of the KV heads"
        )


def check_width(width: int, size: int) -> None:
    """Raise ValueError where a width cannot be divided among ``size`` ranks."""
    if width % size:
        raise ValueError(f"a width of {width} cannot be split over {size} devices")


def _range(start: int, length: int) -> slice:
    return slice(start, start + length)
