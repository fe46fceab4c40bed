"""The interface of all transports: one-sided reads of a peer's registered memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd_serve.protocol.wire import Region


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A range of device memory at a vendor library's address; slicing gives a part of it."""

    address: int
    nbytes: int

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceBytes(self.address + start, max(stop - start, 0))


#: An offset in a remote region and the local bytes that belong there.
Piece = tuple[int, memoryview | DeviceBytes]
HostPiece = tuple[int, memoryview]
#: (offset, nbytes)
Span = tuple[int, int]


class TransferError(Exception):
    """A transfer failed: the peer is gone, the region is unknown, or a piece is out of bounds."""


class PeerGone(TransferError):
    """The peer cannot be reached, or its connection broke."""


class NotMapped(TransferError):
    """The bytes are on a device that this process cannot reach; their owner can offer them from host memory."""


class StillCopying(TransferError):
    """A transfer timed out but may still write its destination, which must not be reused yet."""


class Slab(Protocol):
    """Host memory that peers may read."""

    region: Region
    buffer: memoryview


class DeviceSlab(Protocol):
    """Device memory that peers may read and that can receive reads."""

    region: Region
    buffer: DeviceBytes


class Transport(Protocol):
    """Moves bytes between processes. All calls block and are safe from any thread."""

    def allocate(self, name: str, nbytes: int) -> Slab:
        """Allocate and register ``nbytes`` of zeroed memory."""
        ...

    def register(self, name: str, memory: DeviceBytes) -> DeviceSlab | None:
        """Register device memory, which must stay allocated until the slab is released.

        Returns None if the transport cannot reach device memory. Raises TransferError if registration fails.
        """
        ...

    def release(self, slab: Slab | DeviceSlab) -> None:
        """Withdraw a slab with no transfer under way; its memory is freed with the last view of it."""
        ...

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        """Fill each piece from its offset in ``region``.

        Raises TransferError. Pieces may then be partly filled; only after StillCopying may they still change.
        """
        ...

    def close(self) -> None:
        """Free all memory and connections. Idempotent."""
        ...


def check_bounds(region: Region, pieces: Sequence[Piece]) -> None:
    """Raise TransferError if a piece lies outside its region."""
    for offset, data in pieces:
        if offset < 0 or offset + data.nbytes > region.nbytes:
            raise TransferError(
                f"[{offset}, {offset + data.nbytes}) is outside region {region.name} of {region.nbytes} bytes"
            )


def slab_spans(layers: range, blocks: Sequence[int], num_blocks: int, size: int, *, start: int = 0) -> list[Span]:
    """Return the spans of ``blocks`` in memory [layers, K and V, num_blocks, size], merged where adjacent.

    ``start``: offset of that memory, in bytes.
    """
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    spans: list[Span] = []
    for plane in range(2 * layers.start, 2 * layers.stop):
        for block, count in runs:
            offset = start + (plane * num_blocks + block) * size
            if spans and sum(spans[-1]) == offset:
                spans[-1] = (spans[-1][0], spans[-1][1] + count * size)
            else:
                spans.append((offset, count * size))
    return spans


def pair_spans(some: Sequence[Span], others: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Pair the spans of two layouts of the same bytes as (offset in the first, offset in the second, nbytes).

    Raises TransferError if their sizes differ.
    """
    if sum(nbytes for _, nbytes in some) != sum(nbytes for _, nbytes in others):
        raise TransferError("source and destination spans differ in size")
    pairs: list[tuple[int, int, int]] = []
    ahead = deque(others)
    for here, left in some:
        while left:
            there, nbytes = ahead.popleft()
            count = min(left, nbytes)
            pairs.append((here, there, count))
            here, left = here + count, left - count
            if count < nbytes:
                ahead.appendleft((there + count, nbytes - count))
    return pairs
