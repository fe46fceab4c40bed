"""Reservations of KV blocks at the decode side: reserve → write → complete, each idempotent by transfer id.

While a reservation is GRANTED its blocks may be written by the prefill side at any moment, so they are never
given back on the decode side's word alone: they are QUARANTINED until the writer says that it has stopped, or its
lease is over (a writer must not begin to write after its lease) and it is not in the middle of a write.

Where KV lies on a device that no other process maps, nobody writes there from outside: this side reads what the
other offers, and blocks are given back when its own reads into them have ended.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from epd_serve.cache.block_pool import RequestBlocks
from epd_serve.protocol.wire import ReserveRequest
from epd_serve.transfer.transport import WriteGate


class ReservationState(Enum):
    PENDING = auto()  # waits for blocks
    GRANTED = auto()  # the writer may write
    QUARANTINED = auto()  # given up here, but the writer may still write
    COMPLETED = auto()  # the request owns the blocks
    RELEASED = auto()  # blocks given back, or never taken


_ALLOWED: dict[ReservationState, frozenset[ReservationState]] = {
    ReservationState.PENDING: frozenset({ReservationState.GRANTED, ReservationState.RELEASED}),
    ReservationState.GRANTED: frozenset({ReservationState.COMPLETED, ReservationState.QUARANTINED}),
    ReservationState.QUARANTINED: frozenset({ReservationState.RELEASED}),
    ReservationState.COMPLETED: frozenset(),
    ReservationState.RELEASED: frozenset(),
}


@dataclass(slots=True, kw_only=True)
class Reservation:
    transfer_id: str
    request_id: str
    block_hashes: list[bytes]
    lease_s: float
    deadline: float
    state: ReservationState = ReservationState.PENDING
    blocks: RequestBlocks | None = None

    def move_to(self, state: ReservationState) -> None:
        assert state in _ALLOWED[self.state], f"{self.transfer_id}: {self.state.name} -> {state.name}"
        self.state = state


class ReservationTable:
    """All reservations of a decode instance. Not thread-safe; the clock is passed in as ``now``.

    Args:
        free: gives blocks back to the pool.
        is_being_written: whether a writer is in the middle of writing, given the first block of a reservation that
            is its own.
        gate: is open for each reservation from its grant until the writer has to stop.
    """

    def __init__(
        self,
        free: Callable[[RequestBlocks], None],
        is_being_written: Callable[[int], bool] = lambda block: False,
        gate: WriteGate | None = None,
    ) -> None:
        self._free = free
        self._is_being_written = is_being_written
        self._gate = gate or WriteGate()
        self._live: dict[str, Reservation] = {}
        self._ended: Tombstones[ReservationState] = Tombstones()
        self._reading: Counter[str] = Counter()
        self._late: list[tuple[float, str]] = []  # reads that were given up: (until, transfer)

    def __len__(self) -> int:
        """Reservations that hold or wait for blocks."""
        return len(self._live)

    def open(self, request: ReserveRequest, now: float) -> Reservation | None:
        """Open a PENDING reservation, or find that of the id; None where that one has ended (a late duplicate)."""
        transfer_id = request.transfer_id
        if transfer_id in self._ended:
            return None
        if transfer_id not in self._live:
            self._live[transfer_id] = Reservation(
                transfer_id=transfer_id,
                request_id=request.request_id,
                block_hashes=request.block_hashes,
                lease_s=request.lease_s,
                deadline=now + request.lease_s,
            )
        return self._live[transfer_id]

    def grant(self, reservation: Reservation, blocks: RequestBlocks, now: float) -> None:
        reservation.move_to(ReservationState.GRANTED)
        reservation.blocks = blocks
        reservation.deadline = now + reservation.lease_s
        self._gate.open(reservation.transfer_id)

    def renew(self, transfer_id: str, now: float) -> bool:
        """Extend the lease; False tells the writer to stop: the reservation is gone or given up."""
        reservation = self._live.get(transfer_id)
        if reservation is None or reservation.state is not ReservationState.GRANTED:
            return False
        reservation.deadline = now + reservation.lease_s
        return True

    def begin_read(self, transfer_id: str, blocks: Sequence[int]) -> bool:
        """Whether offered KV is wanted in these blocks; then they are kept until :meth:`end_read`."""
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
        """A read is over; of one that was given up at some time, bytes may arrive for a lease."""
        if given_up_at is not None:
            self._late.append((given_up_at + self._live[transfer_id].lease_s, transfer_id))
            return
        self._reading[transfer_id] -= 1
        if not self._reading[transfer_id]:
            del self._reading[transfer_id]
            reservation = self._live.get(transfer_id)
            if reservation is not None and reservation.deadline == -math.inf:
                self._release(reservation)

    def complete(self, transfer_id: str) -> Reservation | None:
        """End a reservation whose blocks are written; the blocks are the caller's now.

        None for a reservation that is not GRANTED, or is still being written or read.
        """
        reservation = self._live.get(transfer_id)
        if reservation is None or reservation.state is not ReservationState.GRANTED or self._is_busy(reservation):
            return None
        reservation.move_to(ReservationState.COMPLETED)
        self._end(reservation)
        return reservation

    def is_completed(self, transfer_id: str) -> bool:
        """Whether that transfer was completed: a repeated completion is no error."""
        return self._ended.get(transfer_id) is ReservationState.COMPLETED

    def has_blocks(self, request_id: str) -> bool:
        """Whether a reservation of the request is GRANTED."""
        return any(r.request_id == request_id and r.state is ReservationState.GRANTED for r in self._live.values())

    def stop_writing(self, transfer_id: str) -> None:
        """Give blocks back at once: the writer promises to write no more. Idempotent, also before :meth:`open`."""
        reservation = self._live.get(transfer_id)
        if reservation is None:
            self._ended.add(transfer_id, ReservationState.RELEASED)
        else:
            self._release(reservation)

    def abandon(self, request_id: str) -> None:
        """Give up the reservations of a request that was cancelled here; their writers do not know it yet."""
        for reservation in [r for r in self._live.values() if r.request_id == request_id]:
            if reservation.state is ReservationState.PENDING:
                self._release(reservation)
            elif reservation.state is ReservationState.GRANTED:
                reservation.move_to(ReservationState.QUARANTINED)

    def quarantine(self, transfer_id: str, now: float) -> None:
        """Let no more be written.

        As earlier writes may still arrive, the blocks go back when a lease has passed.
        """
        reservation = self._live.get(transfer_id)
        if reservation is None or reservation.state is ReservationState.PENDING:
            self.stop_writing(transfer_id)
            return
        self._quarantine(reservation)
        reservation.deadline = now + reservation.lease_s

    def expire(self, now: float) -> list[Reservation]:
        """Release what outlived its lease and is not being written; returns those that were still wanted."""
        over = [transfer_id for until, transfer_id in self._late if until <= now]
        self._late = [late for late in self._late if late[0] > now]
        for transfer_id in over:
            self.end_read(transfer_id)
        overdue = [r for r in self._live.values() if r.deadline <= now and r.state is not ReservationState.PENDING]
        wanted = [r for r in overdue if r.state is ReservationState.GRANTED]
        for reservation in overdue:
            self._release(reservation)
        return wanted

    def check_integrity(self) -> None:
        for transfer_id, reservation in self._live.items():
            assert transfer_id not in self._ended, "a live reservation has a tombstone"
            holds = reservation.blocks is not None
            assert holds == (reservation.state is not ReservationState.PENDING), "blocks without a grant"
        assert self._live.keys() >= self._reading.keys(), "blocks are read into that were given back"

    def _is_busy(self, reservation: Reservation) -> bool:
        blocks = reservation.blocks
        assert blocks is not None, "no blocks yet"
        first_own = blocks.root[blocks.num_cached]  # those before it held the prompt's beginning already
        return (
            reservation.transfer_id in self._reading
            or self._gate.is_inside(reservation.transfer_id)
            or self._is_being_written(first_own)
        )

    def _quarantine(self, reservation: Reservation) -> None:
        self._gate.shut(reservation.transfer_id)
        if reservation.state is ReservationState.GRANTED:
            reservation.move_to(ReservationState.QUARANTINED)

    def _release(self, reservation: Reservation) -> None:
        if reservation.blocks is not None:
            self._quarantine(reservation)  # first: nothing begins any more, so what is busy now comes to an end
            if self._is_busy(reservation):
                reservation.deadline = -math.inf  # released as soon as it is over
                return
        reservation.move_to(ReservationState.RELEASED)
        self._end(reservation)
        if reservation.blocks is not None:
            self._free(reservation.blocks)

    def _end(self, reservation: Reservation) -> None:
        self._gate.shut(reservation.transfer_id)
        del self._live[reservation.transfer_id]
        self._ended.add(reservation.transfer_id, reservation.state)


V = TypeVar("V")


class Tombstones(OrderedDict[str, V]):
    """The newest ``capacity`` ids, each with the value of its end. An id keeps its first value and its place."""

    def __init__(self, capacity: int = 4096) -> None:
        super().__init__()
        self._capacity = capacity

    def add(self, name: str, value: V) -> None:
        self.setdefault(name, value)
        if len(self) > self._capacity:
            self.popitem(last=False)
