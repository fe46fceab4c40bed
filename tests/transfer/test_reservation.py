"""Reservations as a state machine with its own clock: blocks come back exactly once, in any order of events."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.protocol.wire import KVLayout, ReserveRequest
from epd_serve.transfer.reservation import ReservationState, ReservationTable

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32", model="m")
IDS = st.sampled_from([f"t{i}" for i in range(6)])
LEASE_S = 5.0


def request(transfer_id: str) -> ReserveRequest:
    return ReserveRequest(
        transfer_id=transfer_id,
        request_id=f"request of {transfer_id}",
        num_prompt_tokens=6,
        max_tokens=3,
        num_sequences=1,
        block_hashes=[],
        layout=LAYOUT,
        lease_s=LEASE_S,
    )


class ReservationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(16, 4, state_blocks=1)
        self.first_blocks: dict[str, int] = {}
        self.in_a_write: set[str] = set()
        self.in_a_read: set[str] = set()
        self.late: dict[str, float] = {}
        self.table = ReservationTable(
            free=lambda blocks: self.pool.release(blocks.all()),
            is_being_written=lambda block: block in {self.first_blocks[name] for name in self.in_a_write},
        )
        self.owned: list[RequestBlocks] = []
        self.ended: set[str] = set()
        self.may_write: dict[str, float] = {}

    @rule(transfer_id=IDS)
    def reserve(self, transfer_id: str) -> None:
        reservation = self.table.open(request(transfer_id), self.now)
        assert (reservation is None) == (transfer_id in self.ended)
        if reservation is None or reservation.state is not ReservationState.PENDING:
            return
        if self.pool.num_missing(6, 3) <= self.pool.num_free:
            blocks = self.pool.allocate_request(6, 3)
            self.table.grant(reservation, blocks, self.now)
            self.first_blocks[transfer_id] = blocks.root[0]
            self.may_write[transfer_id] = self.now + LEASE_S

    @rule(transfer_id=IDS)
    def begin_a_write(self, transfer_id: str) -> None:
        if transfer_id in self.may_write:
            self.in_a_write.add(transfer_id)

    @rule(transfer_id=IDS)
    def end_a_write(self, transfer_id: str) -> None:
        self.in_a_write.discard(transfer_id)
        self.pass_time(0.0)

    @rule(transfer_id=IDS, data=st.data())
    def begin_to_read(self, transfer_id: str, data: st.DataObject) -> None:
        """This side reads itself, into the blocks of that transfer alone, a state's among them."""
        reservation = self.table._live.get(transfer_id)
        if reservation is None or reservation.blocks is None or transfer_id in self.in_a_read:
            assert not self.table.begin_read("nobody's", [])
            return
        others = [block for block in range(1, 16) if block not in reservation.blocks.all()]
        assert not self.table.begin_read(transfer_id, [data.draw(st.sampled_from(others))])
        granted = reservation.state is ReservationState.GRANTED
        own = [*reservation.blocks.root[1:], *reservation.blocks.states[0]]
        assert self.table.begin_read(transfer_id, own) == granted
        if granted:
            self.in_a_read.add(transfer_id)

    @rule(transfer_id=IDS)
    def end_a_read(self, transfer_id: str) -> None:
        if transfer_id in self.in_a_read and transfer_id not in self.late:
            self.table.end_read(transfer_id)
            self._has_been_read(transfer_id)
            self.pass_time(0.0)

    @rule(transfer_id=IDS)
    def give_up_a_read(self, transfer_id: str) -> None:
        """Bytes of it may still arrive, for a lease."""
        if transfer_id in self.in_a_read and transfer_id not in self.late:
            self.table.end_read(transfer_id, self.now)
            self.late[transfer_id] = self.now + LEASE_S

    def _has_been_read(self, transfer_id: str) -> None:
        self.in_a_read.discard(transfer_id)
        if transfer_id not in self.table._live:
            self.ended.add(transfer_id)
            self.may_write.pop(transfer_id, None)

    @rule(transfer_id=IDS)
    def complete(self, transfer_id: str) -> None:
        if transfer_id in self.in_a_write:
            return  # a writer says so when it is through
        if transfer_id in self.in_a_read:
            assert self.table.complete(transfer_id) is None
            return
        reservation = self.table.complete(transfer_id)
        if reservation is not None:
            assert reservation.blocks is not None
            self.owned.append(reservation.blocks)
            self.ended.add(transfer_id)
            del self.may_write[transfer_id]

    @rule(transfer_id=IDS)
    def fail_to_write(self, transfer_id: str) -> None:
        """Parts of it may still arrive: nobody else gets the blocks before a lease has passed."""
        live = transfer_id in self.may_write
        self.table.quarantine(transfer_id, self.now)
        if live:
            self.may_write[transfer_id] = self.now + LEASE_S
        else:
            self.ended.add(transfer_id)

    @rule(transfer_id=IDS)
    def stop_writing(self, transfer_id: str) -> None:
        if transfer_id in self.in_a_write:
            return
        self.table.stop_writing(transfer_id)
        if transfer_id not in self.in_a_read:
            self.ended.add(transfer_id)
            self.may_write.pop(transfer_id, None)

    @rule(transfer_id=IDS)
    def abandon(self, transfer_id: str) -> None:
        pending = self.table.open(request(transfer_id), self.now) if transfer_id not in self.ended else None
        self.table.abandon(f"request of {transfer_id}")
        if pending is not None and pending.state is ReservationState.RELEASED:
            self.ended.add(transfer_id)

    @rule(transfer_id=IDS)
    def renew(self, transfer_id: str) -> None:
        if self.table.renew(transfer_id, self.now):
            self.may_write[transfer_id] = self.now + LEASE_S

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        for transfer_id in [t for t, until in self.late.items() if until <= self.now]:
            del self.late[transfer_id]
            self._has_been_read(transfer_id)
        for transfer_id in [t for t, deadline in self.may_write.items() if deadline <= self.now]:
            if transfer_id in self.in_a_write | self.in_a_read:
                continue
            del self.may_write[transfer_id]
            self.ended.add(transfer_id)

    @rule()
    def finish_a_request(self) -> None:
        if self.owned:
            self.pool.release(self.owned.pop().all())

    @invariant()
    def blocks_that_may_be_written_are_held(self) -> None:
        self.table.check_integrity()
        self.pool.check_integrity()
        num_held = self.pool.capacity - self.pool.num_free
        assert num_held == 4 * (len(self.owned) + len(self.may_write))


TestReservations = ReservationMachine.TestCase


def test_blocks_of_an_abandoned_reservation_wait_for_the_writer() -> None:
    pool = BlockPool(16, 4)
    table = ReservationTable(free=lambda blocks: pool.release(blocks.all()))
    reservation = table.open(request("t"), 0.0)
    assert reservation is not None
    table.grant(reservation, pool.allocate_request(6, 3), 0.0)
    table.abandon("request of t")
    assert pool.num_free == pool.capacity - 3
    assert table.complete("t") is None
    assert not table.renew("t", 1.0)
    table.stop_writing("t")
    assert pool.num_free == pool.capacity
    table.stop_writing("t")
    assert pool.num_free == pool.capacity
