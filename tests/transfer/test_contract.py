"""One contract for all transports, between processes: reserve, write, complete, cancel, and all that goes wrong.

The model knows every byte and every block of the decode side; after each step both must be as it says.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transfer_peer import BLOCK_BYTES, LEASE_S, NUM_BLOCKS, SLAB_BYTES, Peer
from transports import TIMEOUT_S, kinds, make_transport, needs_mooncake

from epd_serve.protocol.wire import Region
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.transport import TransferError, Transport

IDS = st.sampled_from([f"t{i}" for i in range(5)])
BOUND_S = 3 * TIMEOUT_S


@dataclass
class Side:
    """The processes that outlive an example: both processes are slow to start."""

    transport: Transport
    peer: Peer


@dataclass
class Granted:
    blocks: list[int]
    deadline: float


@dataclass
class Model:
    """The decode side as it must be."""

    slab: bytearray = field(default_factory=lambda: bytearray(SLAB_BYTES))
    granted: dict[str, Granted] = field(default_factory=dict)
    owned: dict[str, list[int]] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    @property
    def num_free(self) -> int:
        held = [*(g.blocks for g in self.granted.values()), *self.owned.values()]
        return NUM_BLOCKS - sum(len(blocks) for blocks in held)


class Contract(RuleBasedStateMachine):
    kind: str
    side: Side

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.model = Model()
        self.region = self.side.peer.call("reset")
        self.num_losses = 0

    @rule(transfer_id=IDS, num_blocks=st.integers(1, 4))
    def reserve(self, transfer_id: str, num_blocks: int) -> None:
        """A duplicate gets the same blocks; one that has ended, none; and so where memory is out."""
        answer = self.side.peer.call("reserve", transfer_id, num_blocks, self.now)
        if transfer_id in self.model.ended:
            assert answer == "ended"
        elif transfer_id in self.model.granted:
            assert answer == self.model.granted[transfer_id].blocks
        elif self.model.num_free < num_blocks:
            assert answer == "full"
        else:
            assert len(answer) == num_blocks
            self.model.granted[transfer_id] = Granted(answer, self.now + LEASE_S)

    @precondition(lambda self: self.model.granted)
    @rule(data=st.data(), payload=st.binary(min_size=1, max_size=BLOCK_BYTES), times=st.integers(1, 2))
    def write(self, data: st.DataObject, payload: bytes, times: int) -> None:
        """To some blocks of a reservation, in one call; written twice it is the same."""
        transfer_id = data.draw(st.sampled_from(sorted(self.model.granted)))
        blocks = self.model.granted[transfer_id].blocks
        chosen = data.draw(st.lists(st.sampled_from(blocks), unique=True, min_size=1))
        at = data.draw(st.integers(0, BLOCK_BYTES - len(payload)))
        offsets = [block * BLOCK_BYTES + at for block in chosen]
        for _ in range(times):
            self.side.transport.write(
                self.region, [(offset, memoryview(payload)) for offset in offsets], [transfer_id]
            )
        for offset in offsets:
            self.model.slab[offset : offset + len(payload)] = payload

    @precondition(lambda self: self.kind == "tcp" and self.model.ended)
    @rule(data=st.data(), other=st.lists(IDS, max_size=1), start=st.integers(0, SLAB_BYTES - 1))
    def write_late(self, data: st.DataObject, other: list[str], start: int) -> None:
        """The transfer is over, perhaps that of another in the same call is not: not a byte arrives."""
        ended = data.draw(st.sampled_from(sorted(self.model.ended)))
        with pytest.raises(TransferError):
            self.side.transport.write(self.region, [(start, memoryview(b"x"))], [*other, ended])

    @rule(start=st.integers(0, SLAB_BYTES - 1), nbytes=st.integers(1, SLAB_BYTES))
    def read(self, start: int, nbytes: int) -> None:
        """As the pull mode does, and the consumer of a feature."""
        data = bytearray(min(nbytes, SLAB_BYTES - start))
        self.side.transport.read(self.region, [(start, memoryview(data))])
        assert data == self.model.slab[start : start + len(data)]

    @rule(transfer_id=IDS)
    def complete(self, transfer_id: str) -> None:
        """Once, or again; a late one finds the transfer ended."""
        answer = self.side.peer.call("complete", transfer_id)
        granted = self.model.granted.pop(transfer_id, None)
        if granted is not None:
            self.model.owned[transfer_id] = granted.blocks
            self.model.completed.add(transfer_id)
            self.model.ended.add(transfer_id)
        assert answer == (transfer_id in self.model.completed)

    @precondition(lambda self: self.model.owned)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.model.owned)))
        self.side.peer.call("finish", transfer_id)
        del self.model.owned[transfer_id]

    @rule(transfer_id=IDS)
    def cancel(self, transfer_id: str) -> None:
        """Before the reservation, during it, or late."""
        self.side.peer.call("cancel", transfer_id)
        self.model.granted.pop(transfer_id, None)
        self.model.ended.add(transfer_id)

    @rule(transfer_id=IDS)
    def renew(self, transfer_id: str) -> None:
        granted = self.model.granted.get(transfer_id)
        assert self.side.peer.call("renew", transfer_id, self.now) == (granted is not None)
        if granted is not None:
            granted.deadline = self.now + LEASE_S

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.side.peer.call("expire", self.now)
        for transfer_id in [t for t, g in self.model.granted.items() if g.deadline <= self.now]:
            del self.model.granted[transfer_id]
            self.model.ended.add(transfer_id)

    @rule(beyond=st.integers(1, 200))
    def write_out_of_bounds(self, beyond: int) -> None:
        with pytest.raises(TransferError, match="outside region"):
            self.side.transport.write(self.region, [(SLAB_BYTES - 1, memoryview(bytes(1 + beyond)))])

    @precondition(lambda self: self.num_losses == 0)
    @rule(restarted=st.booleans(), payload=st.binary(min_size=1, max_size=BLOCK_BYTES))
    def lose_the_peer(self, restarted: bool, payload: bytes) -> None:
        """It is killed; another comes in its place. Who still writes to the first never reaches the second."""
        self.num_losses += 1
        lost = self.region
        self.side.peer.kill()
        if not restarted:
            self._write_to_a_lost(lost, payload)
        self.side.peer = Peer(self.kind)
        self.region, self.model = self.side.peer.region, Model()
        self._write_to_a_lost(lost, payload)
        self._write_to_a_lost(msgspec.structs.replace(self.region, name=lost.name), payload)

    def _write_to_a_lost(self, region: Region, payload: bytes) -> None:
        started = time.monotonic()
        fresh = make_transport(self.kind)  # one that has no mapping of the lost memory, which would keep it alive
        try:
            with pytest.raises(TransferError):
                fresh.write(region, [(0, memoryview(payload))])
            with pytest.raises(TransferError):
                fresh.read(region, [(0, memoryview(bytearray(8)))])
        finally:
            fresh.close()
        with suppress(TransferError):  # shared memory that is mapped outlives its process: the write goes nowhere
            self.side.transport.write(region, [(0, memoryview(payload))])
        assert time.monotonic() - started < 3 * BOUND_S

    @invariant()
    def both_sides_agree(self) -> None:
        slab, num_free = self.side.peer.call("look")
        assert slab == bytes(self.model.slab)
        assert num_free == self.model.num_free
        if isinstance(self.side.transport, MooncakeTransport):
            self.side.transport.check_integrity()


@pytest.mark.parametrize(
    "kind",
    [
        *kinds("shm", "tcp", "mooncake"),
        pytest.param("mooncake device", marks=[needs_mooncake, pytest.mark.slow]),  # its processes load torch
    ],
)
def test_contract(kind: str) -> None:
    side = Side(make_transport(kind), Peer(kind))
    try:
        machine = type("ContractOfKind", (Contract,), {"kind": kind, "side": side})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=12 if "mooncake" in kind else 30,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    finally:
        side.peer.kill()
        side.transport.close()
