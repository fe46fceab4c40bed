"""Reservations as a state machine with its own clock: blocks come back exactly once, in any order of events."""

from collections import Counter

from hand_off import reserve
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.transfer.kv_receiver import KVReceiver

IDS = st.sampled_from([f"transfer {i}" for i in range(6)])
LEASE_S = 5.0


class ReservationMachine(RuleBasedStateMachine):
    """The model: the lease of each granted transfer, the reads under way, transfers that wait for their end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(16, 4, state_blocks=1)
        self.table = KVReceiver(None, None, free=lambda blocks: self.pool.release(blocks.all()))
        self.pending: set[str] = set()
        self.blocks: dict[str, RequestBlocks] = {}
        self.leases: dict[str, float] = {}
        self.reads: Counter[str] = Counter()
        self.late: list[tuple[float, str]] = []
        self.ending: set[str] = set()
        self.owned: list[RequestBlocks] = []
        self.ended: set[str] = set()

    @rule(transfer_id=IDS)
    def reserve(self, transfer_id: str) -> None:
        reservation = self.table.open(reserve(transfer_id[-1], 6, lease_s=LEASE_S), self.now)
        assert (reservation is None) == (transfer_id in self.ended)
        if reservation is None or transfer_id in self.blocks:
            return
        self.pending.add(transfer_id)
        if self.pool.num_missing(6, 3) <= self.pool.num_free:
            self.blocks[transfer_id] = self.pool.allocate_request(6, 3)
            self.table.grant(reservation, self.blocks[transfer_id], self.now)
            self.leases[transfer_id] = self.now + LEASE_S
            self.pending.discard(transfer_id)

    @rule(transfer_id=IDS, data=st.data())
    def begin_to_read(self, transfer_id: str, data: st.DataObject) -> None:
        """Into the blocks of that transfer alone, a state's among them."""
        if transfer_id not in self.blocks:
            assert not self.table.begin_read(transfer_id, [])
            return
        blocks = self.blocks[transfer_id]
        others = [block for block in range(1, 16) if block not in blocks.all()]
        assert not self.table.begin_read(transfer_id, [data.draw(st.sampled_from(others))])
        is_wanted = self.table.begin_read(transfer_id, [*blocks.root[1:], *blocks.states[0]])
        assert is_wanted == (transfer_id in self.leases)
        self.reads[transfer_id] += is_wanted

    @precondition(lambda self: +self.reads)
    @rule(data=st.data(), is_late=st.booleans())
    def end_a_read(self, data: st.DataObject, is_late: bool) -> None:
        """Bytes of one that was given up may still arrive, for a lease."""
        transfer_id = data.draw(st.sampled_from(sorted(+self.reads)))
        if self.reads[transfer_id] <= sum(name == transfer_id for _, name in self.late):
            return
        self.table.end_read(transfer_id, self.now if is_late else None)
        if is_late:
            self.late.append((self.now + LEASE_S, transfer_id))
        else:
            self._is_read(transfer_id)

    def _is_read(self, transfer_id: str) -> None:
        self.reads[transfer_id] -= 1
        if not self.reads[transfer_id] and transfer_id in self.ending:
            self._has_ended(transfer_id)

    def _has_ended(self, transfer_id: str) -> None:
        self.ended.add(transfer_id)
        for kept in (self.pending, self.ending):
            kept.discard(transfer_id)
        self.blocks.pop(transfer_id, None)
        self.leases.pop(transfer_id, None)

    def _is_given_up(self, transfer_id: str) -> None:
        if self.reads[transfer_id]:
            self.ending.add(transfer_id)
            self.leases.pop(transfer_id, None)
        else:
            self._has_ended(transfer_id)

    @rule(transfer_id=IDS)
    def complete(self, transfer_id: str) -> None:
        reservation = self.table.complete(transfer_id)
        assert (reservation is not None) == (transfer_id in self.leases and not self.reads[transfer_id])
        if reservation is not None:
            self.owned.append(self.blocks[transfer_id])
            self._has_ended(transfer_id)

    @rule(transfer_id=IDS)
    def release(self, transfer_id: str) -> None:
        self.table.release(transfer_id)
        self._is_given_up(transfer_id)

    @rule(transfer_id=IDS)
    def abandon(self, transfer_id: str) -> None:
        self.table.abandon(transfer_id[-1])
        if transfer_id in self.pending or transfer_id in self.blocks:
            self._is_given_up(transfer_id)

    @rule(transfer_id=IDS)
    def renew(self, transfer_id: str) -> None:
        assert self.table.renew(transfer_id, self.now) == (transfer_id in self.leases)
        if transfer_id in self.leases:
            self.leases[transfer_id] = self.now + LEASE_S

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        overdue = {name for name, deadline in self.leases.items() if deadline <= self.now}
        over = [name for until, name in self.late if until <= self.now]
        self.late = [one for one in self.late if one[0] > self.now]
        assert {one.request.transfer_id for one in self.table.expire(self.now)} == overdue
        for transfer_id in over:
            self._is_read(transfer_id)
        for transfer_id in overdue:
            self._is_given_up(transfer_id)

    @rule()
    def finish_a_request(self) -> None:
        if self.owned:
            self.pool.release(self.owned.pop().all())

    @invariant()
    def blocks_that_may_be_written_are_held(self) -> None:
        self.table.check_integrity()
        self.pool.check_integrity()
        num_held = self.pool.capacity - self.pool.num_free
        assert num_held == 4 * (len(self.owned) + len(self.blocks))


TestReservations = ReservationMachine.TestCase
