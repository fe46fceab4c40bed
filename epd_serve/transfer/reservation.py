"""Reservations of KV blocks at a decode instance: reserve → read → complete, each idempotent by transfer id.

Only the decode instance writes into its blocks, so they are free once its own reads have ended. The prefill
instance renews a lease; the reservation of a dead one expires.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from epd_serve.cache.block_pool import RequestBlocks
from epd_serve.protocol.wire import ReserveRequest


class ReservationState(Enum):
    PENDING = auto()  # waits for blocks
    GRANTED = auto()  # KV may be read into its blocks
    ENDING = auto()  # given up while a read into its blocks is under way
    COMPLETED = auto()  # the request owns the blocks
    RELEASED = auto()  # blocks freed, or never allocated


@dataclass(slots=True, kw_only=True)
class Reservation:
    request: ReserveRequest
    deadline: float
    state: ReservationState = ReservationState.PENDING
    blocks: RequestBlocks | None = None


class ReservationTable:
    """All reservations of a decode instance. Not thread-safe; the clock is passed in as ``now``."""

    def __init__(self, free: Callable[[RequestBlocks], None]) -> None:
        self._free = free
        self._live: dict[str, Reservation] = {}
        self._ended: Tombstones[ReservationState] = Tombstones()
        self._reading: Counter[str] = Counter()
        self._late: list[tuple[float, str]] = []  # timed-out reads: (when to end them, transfer)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: ReserveRequest, now: float) -> Reservation | None:
        """Return the transfer's reservation, new ones PENDING; None for a late duplicate of an ended one."""
        transfer_id = request.transfer_id
        if transfer_id in self._ended:
            return None
        if transfer_id not in self._live:
            self._live[transfer_id] = Reservation(request=request, deadline=now + request.lease_s)
        return self._live[transfer_id]

    def grant(self, reservation: Reservation, blocks: RequestBlocks, now: float) -> None:
        assert reservation.state is ReservationState.PENDING
        reservation.state = ReservationState.GRANTED
        reservation.blocks = blocks
        reservation.deadline = now + reservation.request.lease_s

    def renew(self, transfer_id: str, now: float) -> bool:
        """Extend the lease; return False if the reservation has ended."""
        reservation = self._live.get(transfer_id)
        if reservation is None or reservation.state is not ReservationState.GRANTED:
            return False
        reservation.deadline = now + reservation.request.lease_s
        return True

    def begin_read(self, transfer_id: str, blocks: Sequence[int]) -> bool:
        """Return whether announced KV may be read into these blocks, which then stay until :meth:`end_read`."""
        reservation = self._live.get(transfer_id)
        if reservation is None or reservation.state is not ReservationState.GRANTED:
            return False
        assert reservation.blocks is not None
        own = reservation.blocks.written(len(reservation.blocks.root))
        if not set(own[reservation.blocks.num_cached :]).issuperset(blocks):
            return False
        self._reading[transfer_id] += 1
        return True

    def end_read(self, transfer_id: str, given_up_at: float | None = None) -> None:
        """End a read; bytes of one that timed out may arrive for another lease."""
        if given_up_at is not None:
            self._late.append((given_up_at + self._live[transfer_id].request.lease_s, transfer_id))
            return
        self._reading[transfer_id] -= 1
        if not self._reading[transfer_id]:
            del self._reading[transfer_id]
            reservation = self._live[transfer_id]
            if reservation.state is ReservationState.ENDING:
                self.release(transfer_id)

    def complete(self, transfer_id: str) -> Reservation | None:
        """End a filled reservation; the caller now owns its blocks.

        Returns None if it is not GRANTED or a read is under way.
        """
        reservation = self._live.get(transfer_id)
        if (
            reservation is None
            or reservation.state is not ReservationState.GRANTED
            or transfer_id in self._reading
        ):
            return None
        self._end(reservation, ReservationState.COMPLETED)
        return reservation

    def is_completed(self, transfer_id: str) -> bool:
        return self._ended.get(transfer_id) is ReservationState.COMPLETED

    def has_blocks(self, request_id: str) -> bool:
        """Return whether a reservation of the request is GRANTED."""
        granted = (r for r in self._live.values() if r.state is ReservationState.GRANTED)
        return any(r.request.request_id == request_id for r in granted)

    def release(self, transfer_id: str) -> None:
        """Free the blocks once no read into them is under way. Idempotent, also before :meth:`open`."""
        reservation = self._live.get(transfer_id)
        if reservation is None:
            self._ended.add(transfer_id, ReservationState.RELEASED)
        elif transfer_id in self._reading:
            if reservation.state is ReservationState.GRANTED:
                reservation.state = ReservationState.ENDING
        else:
            self._end(reservation, ReservationState.RELEASED)
            if reservation.blocks is not None:
                self._free(reservation.blocks)

    def abandon(self, request_id: str) -> None:
        """Release all reservations of a request."""
        for transfer_id in [name for name, r in self._live.items() if r.request.request_id == request_id]:
            self.release(transfer_id)

    def expire(self, now: float) -> list[Reservation]:
        """Release the reservations whose lease has expired and return them."""
        over = [transfer_id for until, transfer_id in self._late if until <= now]
        self._late = [late for late in self._late if late[0] > now]
        for transfer_id in over:
            self.end_read(transfer_id)
        wanted = [r for r in self._live.values() if r.deadline <= now and r.state is ReservationState.GRANTED]
        for reservation in wanted:
            self.release(reservation.request.transfer_id)
        return wanted

    def check_integrity(self) -> None:
        for transfer_id, reservation in self._live.items():
            assert transfer_id not in self._ended, "a live reservation has a tombstone"
            holds = reservation.blocks is not None
            assert holds == (reservation.state is not ReservationState.PENDING), "blocks without a grant"
            is_ending = reservation.state is ReservationState.ENDING
            assert not is_ending or transfer_id in self._reading, "blocks are kept without a read"
        assert self._live.keys() >= self._reading.keys(), "a read into freed blocks is under way"

    def _end(self, reservation: Reservation, state: ReservationState) -> None:
        reservation.state = state
        del self._live[reservation.request.transfer_id]
        self._ended.add(reservation.request.transfer_id, state)


V = TypeVar("V")


class Tombstones(OrderedDict[str, V]):
    """The newest ``capacity`` ended ids, each with the first value it was added with."""

    def __init__(self, capacity: int = 4096) -> None:
        super().__init__()
        self._capacity = capacity

    def add(self, name: str, value: V) -> None:
        self.setdefault(name, value)
        if len(self) > self._capacity:
            self.popitem(last=False)
