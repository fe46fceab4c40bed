"""One contract for all transports, between processes: what the owner has the reader gets, or an error in time.

The model knows every byte of the owner.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transfer_peer import SLAB_BYTES, Peer
from transports import TIMEOUT_S, kinds, make_transport, needs_mooncake

from epd_serve.protocol.wire import Region
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.transport import TransferError, Transport

BOUND_S = 3 * TIMEOUT_S


@dataclass
class Side:
    """The processes that outlive an example: both processes are slow to start."""

    transport: Transport
    peer: Peer


class Contract(RuleBasedStateMachine):
    kind: str
    side: Side

    def __init__(self) -> None:
        super().__init__()
        self.region = self.side.peer.region
        self.content = bytearray(SLAB_BYTES)
        self.side.peer.fill(0, bytes(SLAB_BYTES))
        self.num_losses = 0

    @rule(start=st.integers(0, SLAB_BYTES - 1), data=st.binary(min_size=1, max_size=SLAB_BYTES))
    def fill(self, start: int, data: bytes) -> None:
        data = data[: SLAB_BYTES - start]
        self.side.peer.fill(start, data)
        self.content[start : start + len(data)] = data

    @rule(spans=st.lists(st.tuples(st.integers(0, SLAB_BYTES - 1), st.integers(0, SLAB_BYTES // 6)), max_size=6))
    def read(self, spans: list[tuple[int, int]]) -> None:
        """Some pieces in one call, also none."""
        pieces = [(start, bytearray(min(nbytes, SLAB_BYTES - start))) for start, nbytes in spans]
        self.side.transport.read(self.region, [(start, memoryview(data)) for start, data in pieces])
        for start, data in pieces:
            assert data == self.content[start : start + len(data)]

    @rule(beyond=st.integers(1, 200))
    def read_out_of_bounds(self, beyond: int) -> None:
        with pytest.raises(TransferError, match="outside region"):
            self.side.transport.read(self.region, [(SLAB_BYTES - 1, memoryview(bytearray(1 + beyond)))])

    @precondition(lambda self: self.num_losses == 0)
    @rule(restarted=st.booleans())
    def lose_the_peer(self, restarted: bool) -> None:
        """It is killed; another comes in its place. Who still reads from the first never reads from the second."""
        self.num_losses += 1
        lost = self.region
        self.side.peer.kill()
        if not restarted:
            self._read_from_a_lost(lost)
        self.side.peer = Peer(self.kind)
        self.region, self.content = self.side.peer.region, bytearray(SLAB_BYTES)
        self._read_from_a_lost(lost)
        self._read_from_a_lost(msgspec.structs.replace(self.region, name=lost.name))

    def _read_from_a_lost(self, region: Region) -> None:
        started = time.monotonic()
        fresh = make_transport(self.kind)  # one that has no mapping of the lost memory, which would keep it alive
        try:
            with pytest.raises(TransferError):
                fresh.read(region, [(0, memoryview(bytearray(8)))])
        finally:
            fresh.close()
        with suppress(TransferError):  # shared memory that is mapped outlives its process
            self.side.transport.read(region, [(0, memoryview(bytearray(8)))])
        assert time.monotonic() - started < 3 * BOUND_S

    @invariant()
    def nothing_is_kept(self) -> None:
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
                max_examples=5 if "mooncake" in kind else 15,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    finally:
        side.peer.kill()
        side.transport.close()
