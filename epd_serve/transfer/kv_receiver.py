"""The KV that a decode instance receives: reserve → read → complete. A repeated read or complete does no harm.

The prefill instance's side is :mod:`epd_serve.transfer.kv_sender`. Only the decode instance writes into its
blocks, so they are free once its own reads have ended. The prefill instance renews a lease; the reservation of a
dead one expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd_serve.cache.block_pool import RequestBlocks
from epd_serve.protocol.wire import KVAnnouncement, ReserveRequest, SentKV
from epd_serve.recent import Recent
from epd_serve.transfer.kv_sender import KVBlocks
from epd_serve.transfer.transport import Piece, StillCopying, Transport, pair_spans


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks for one transfer.

    Attributes:
        deadline: end of the lease.
        blocks: None while the reservation waits for them.
        num_reads: reads into the blocks that are under way.
        has_ended: given up or completed. Blocks that were given up are free once ``num_reads`` is 0.
    """

    request: ReserveRequest
    deadline: float
    blocks: RequestBlocks | None = None
    num_reads: int = 0
    has_ended: bool = False

    @property
    def is_granted(self) -> bool:
        """Return whether KV may be read into its blocks."""
        return self.blocks is not None and not self.has_ended


class KVReceiver:
    """All reservations of a decode instance, and reads into their blocks.

    Not thread-safe; the clock is passed in as ``now``.
    """

    def __init__(self, memory: KVBlocks, transport: Transport, free: Callable[[RequestBlocks], None]) -> None:
        self._memory = memory
        self._transport = transport
        self._free = free
        self._live: dict[str, Reservation] = {}
        self._ended: Recent[str] = Recent()
        self._completed: Recent[str] = Recent()
        self._late: list[tuple[float, str]] = []  # timed-out reads: (when to end them, transfer)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: ReserveRequest, now: float) -> Reservation | None:
        """Return the transfer's reservation, at first without blocks; None for a late duplicate."""
        transfer_id = request.transfer_id
        if transfer_id in self._ended:
            return None
        if transfer_id not in self._live:
            self._live[transfer_id] = Reservation(request=request, deadline=now + request.lease_s)
        return self._live[transfer_id]

    def grant(self, reservation: Reservation, blocks: RequestBlocks, now: float) -> None:
        assert reservation.blocks is None and not reservation.has_ended
        reservation.blocks = blocks
        reservation.deadline = now + reservation.request.lease_s

    def renew(self, transfer_id: str, now: float) -> bool:
        """Extend the lease; return False if the reservation has ended."""
        if (reservation := self._granted(transfer_id)) is not None:
            reservation.deadline = now + reservation.request.lease_s
        return reservation is not None

    async def read(self, announcement: KVAnnouncement) -> tuple[list[SentKV], float]:
        """Read announced KV into the blocks of its transfers; return the parts read, and the seconds taken.

        Transfers that have ended are skipped. The blocks stay reserved until the read ends, even if this call is
        cancelled. Raises TransferError.
        """
        parts = [part for part in announcement.parts if self.begin_read(part.transfer_id, part.block_ids)]
        read = asyncio.to_thread(read_kv, announcement, parts, self._memory, self._transport)

        def end_read(reading: asyncio.Task[float]) -> None:
            error = None if reading.cancelled() else reading.exception()  # the call reports it to P
            given_up_at = time.monotonic() if isinstance(error, StillCopying) else None
            for part in parts:
                self.end_read(part.transfer_id, given_up_at)

        reading = asyncio.create_task(read)
        reading.add_done_callback(end_read)
        return parts, await asyncio.shield(reading)

    def begin_read(self, transfer_id: str, blocks: Sequence[int]) -> bool:
        """Return whether announced KV may be read into these blocks, which then stay until :meth:`end_read`."""
        if (reservation := self._granted(transfer_id)) is None or reservation.blocks is None:
            return False
        own = reservation.blocks.written(len(reservation.blocks.root))
        if not set(own[reservation.blocks.num_cached :]).issuperset(blocks):
            return False
        reservation.num_reads += 1
        return True

    def end_read(self, transfer_id: str, given_up_at: float | None = None) -> None:
        """End a read; bytes of one that timed out may arrive for another lease."""
        reservation = self._live[transfer_id]
        if given_up_at is not None:
            self._late.append((given_up_at + reservation.request.lease_s, transfer_id))
            return
        reservation.num_reads -= 1
        if reservation.has_ended:
            self.release(transfer_id)

    def complete(self, transfer_id: str) -> Reservation | None:
        """End a filled reservation; the caller now owns its blocks.

        Returns None if it has no blocks, has ended, or a read is under way.
        """
        reservation = self._granted(transfer_id)
        if reservation is None or reservation.num_reads:
            return None
        self._end(reservation)
        self._completed.add(transfer_id)
        return reservation

    def is_completed(self, transfer_id: str) -> bool:
        return transfer_id in self._completed

    def has_blocks(self, request_id: str) -> bool:
        """Return whether a reservation of the request has blocks."""
        return any(one.is_granted and one.request.request_id == request_id for one in self._live.values())

    def release(self, transfer_id: str) -> None:
        """Free the blocks once no read into them is under way. Idempotent, also before :meth:`open`."""
        reservation = self._live.get(transfer_id)
        if reservation is None:
            self._ended.add(transfer_id)
        elif reservation.num_reads:
            reservation.has_ended = True
        else:
            self._end(reservation)
            if reservation.blocks is not None:
                self._free(reservation.blocks)

    def abandon(self, request_id: str) -> None:
        """Release all reservations of a request."""
        for transfer_id in [name for name, one in self._live.items() if one.request.request_id == request_id]:
            self.release(transfer_id)

    def expire(self, now: float) -> list[Reservation]:
        """Release the reservations whose lease has expired and return them."""
        over = [transfer_id for until, transfer_id in self._late if until <= now]
        self._late = [late for late in self._late if late[0] > now]
        for transfer_id in over:
            self.end_read(transfer_id)
        expired = [one for one in self._live.values() if one.deadline <= now and one.is_granted]
        for reservation in expired:
            self.release(reservation.request.transfer_id)
        return expired

    def check_integrity(self) -> None:
        for transfer_id, reservation in self._live.items():
            assert transfer_id not in self._ended, "a live reservation has a tombstone"
            assert not reservation.num_reads or reservation.blocks is not None, "a read without blocks"
            assert not reservation.has_ended or reservation.num_reads, "blocks are kept without a read"

    def _granted(self, transfer_id: str) -> Reservation | None:
        reservation = self._live.get(transfer_id)
        return reservation if reservation is not None and reservation.is_granted else None

    def _end(self, reservation: Reservation) -> None:
        reservation.has_ended = True
        del self._live[reservation.request.transfer_id]
        self._ended.add(reservation.request.transfer_id)


def read_kv(
    announcement: KVAnnouncement, parts: Sequence[SentKV], memory: KVBlocks, transport: Transport
) -> float:
    """Read parts of an announcement into their blocks and return the seconds taken.

    One read covers all parts, because P announces no more than fits into the landing memory. Raises TransferError.
    """
    layers = range(announcement.first_layer, announcement.end_layer)
    blocks = [block for part in parts for block in part.block_ids]
    start = time.monotonic()
    if not blocks:
        transport.read(announcement.region, [])  # only open the connection
    elif parts[0].source_ids:
        memory.read_mapped(announcement.region, layers, [one for part in parts for one in part.source_ids], blocks)
    else:
        with memory.land(layers, [part.block_ids for part in parts]) as places:
            pieces: list[Piece] = []
            for part, place in zip(parts, places, strict=True):
                pairs = pair_spans(part.spans, place)
                pieces += [(there, memory.buffer[here : here + count]) for there, here, count in pairs]
            start = time.monotonic()
            transport.read(announcement.region, pieces)
            return time.monotonic() - start
    return time.monotonic() - start
