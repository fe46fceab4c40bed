"""The interface of all transports: one-sided reads of registered memory. Nobody writes into another's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd_serve.protocol.wire import Region


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes in a device's memory; a slice of them is a part.

    Attributes:
        address: as the libraries of the device's vendor have it.
    """

    address: int
    nbytes: int

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self.nbytes)
        return DeviceBytes(self.address + start, max(stop - start, 0))


#: An offset in a remote region and the local bytes that belong there.
Piece = tuple[int, memoryview | DeviceBytes]
HostPiece = tuple[int, memoryview]
#: ``nbytes`` from ``offset`` on.
Span = tuple[int, int]


class TransferError(Exception):
    """Bytes could not be moved: the peer is gone, the region unknown, or a piece out of its bounds."""


class PeerGone(TransferError):
    """The other process cannot be reached, or the connection to it broke."""


class NotMapped(TransferError):
    """The bytes are on a device that this process does not reach; their owner can give them by the host."""


class StillCopying(TransferError):
    """Bytes were not moved in time, and may yet be: what they were meant for is not to be used for a while."""


class Slab(Protocol):
    """Memory that peers may read."""

    @property
    def region(self) -> Region: ...

    @property
    def buffer(self) -> memoryview: ...


class DeviceSlab(Protocol):
    """A device's memory that peers may read, and that other regions are read into."""

    @property
    def region(self) -> Region: ...

    @property
    def buffer(self) -> DeviceBytes: ...


class Transport(Protocol):
    """Moves bytes; knows nothing of requests. All calls block and are safe from any thread."""

    def allocate(self, name: str, nbytes: int) -> Slab:
        """Register ``nbytes`` of zeroed memory under a name that is new to this transport."""
        ...

    def register(self, name: str, memory: DeviceBytes) -> DeviceSlab | None:
        """Let peers reach memory of the instance's device, which must stay there until the slab is released.

        None where the transport does not reach such memory. Raises TransferError where it refuses this.
        """
        ...

    def release(self, slab: Slab | DeviceSlab) -> None:
        """Offer a slab no longer; its memory goes with the last view of it. No transfer may be under way."""
        ...

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        """Fill each piece from its offset in ``region``.

        Raises TransferError; then any part may have been filled, and none is any more unless it is StillCopying.
        """
        ...

    def close(self) -> None:
        """Give back all memory and connections. Idempotent."""
        ...


def check_bounds(region: Region, pieces: Sequence[Piece]) -> None:
    """Raise TransferError for a piece that does not lie inside its region."""
    for offset, data in pieces:
        if offset < 0 or offset + data.nbytes > region.nbytes:
            raise TransferError(
                f"[{offset}, {offset + data.nbytes}) is outside region {region.name} of {region.nbytes} bytes"
            )


def slab_spans(
    layers: range,
    blocks: Sequence[int],
    num_blocks: int,
    size: int,
    *,
    start: int = 0,
    first_layer: int = 0,
    planes: int = 2,
) -> list[Span]:
    """The places of blocks in memory [layers, planes, num_blocks] of ``size`` bytes each; neighbours are one span.

    Args:
        start: of that memory, in bytes. first_layer: the layer with which it begins.
    """
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    spans: list[Span] = []
    for plane in range(planes * (layers.start - first_layer), planes * (layers.stop - first_layer)):
        for block, count in runs:
            offset = start + (plane * num_blocks + block) * size
            if spans and sum(spans[-1]) == offset:
                spans[-1] = (spans[-1][0], spans[-1][1] + count * size)
            else:
                spans.append((offset, count * size))
    return spans


def paired(some: Sequence[Span], others: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Lay two lists of spans of the same bytes side by side: (offset in one, offset in the other, bytes).

    Raises TransferError where they differ in length.
    """
    if sum(nbytes for _, nbytes in some) != sum(nbytes for _, nbytes in others):
        raise TransferError("the places of the KV here and there are not of one size")
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
