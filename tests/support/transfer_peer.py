"""A process with the memory and the books of a decode instance, led through a pipe.

It is here because a spawned process imports by name, and tests have none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from transports import make_transport

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.protocol.wire import KVLayout, Region, ReserveRequest
from epd_serve.transfer.reservation import ReservationState, ReservationTable

BLOCK_BYTES = 96
NUM_BLOCKS = 8  # and the scratch block
SLAB_BYTES = BLOCK_BYTES * (NUM_BLOCKS + 1)
BLOCK_SIZE = 4
LEASE_S = 5.0
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32", model="m")


class _Decoder:
    """Answers each command; the clock is the test's."""

    def __init__(self, kind: str, slab_bytes: int) -> None:
        self._transport = make_transport(kind)
        self._slab_bytes = slab_bytes
        self._transfer_ids: set[str] = set()
        self.reset()

    def reset(self) -> Region:
        for transfer_id in self._transfer_ids:
            self.cancel(transfer_id)
        self._slab = self._transport.allocate("kv", self._slab_bytes)
        self._pool = BlockPool(NUM_BLOCKS + 1, BLOCK_SIZE)
        self._table = ReservationTable(
            free=lambda blocks: self._pool.release(blocks.all()), gate=self._transport.gate
        )
        self._owned: dict[str, RequestBlocks] = {}
        return self._slab.region

    def reserve(self, transfer_id: str, num_blocks: int, now: float) -> list[int] | str:
        """Block ids; "ended", or "full" where there are not enough."""
        num_tokens = num_blocks * BLOCK_SIZE - 1
        request = ReserveRequest(
            transfer_id=transfer_id,
            request_id=f"request of {transfer_id}",
            num_prompt_tokens=num_tokens,
            max_tokens=1,
            num_sequences=1,
            block_hashes=[],
            layout=_LAYOUT,
            lease_s=LEASE_S,
        )
        self._transfer_ids.add(transfer_id)
        reservation = self._table.open(request, now)
        if reservation is None:
            return "ended"
        if reservation.state is ReservationState.PENDING:
            if self._pool.num_missing(num_tokens, 1) > self._pool.num_free:
                return "full"
            self._table.grant(reservation, self._pool.allocate_request(num_tokens, 1), now)
        assert reservation.blocks is not None
        return reservation.blocks.root

    def complete(self, transfer_id: str) -> bool:
        """Whether the transfer is completed, now or before."""
        reservation = self._table.complete(transfer_id)
        if reservation is not None:
            assert reservation.blocks is not None
            self._owned[transfer_id] = reservation.blocks
        return reservation is not None or self._table.is_completed(transfer_id)

    def finish(self, transfer_id: str) -> None:
        self._pool.release(self._owned.pop(transfer_id).all())

    def cancel(self, transfer_id: str) -> None:
        self._table.stop_writing(transfer_id)

    def renew(self, transfer_id: str, now: float) -> bool:
        return self._table.renew(transfer_id, now)

    def expire(self, now: float) -> None:
        self._table.expire(now)

    def look(self) -> tuple[bytes, int]:
        """The slab, and the number of free blocks once the books are found to balance."""
        self._table.check_integrity()
        self._pool.check_integrity()
        return bytes(self._slab.buffer), self._pool.num_free


def serve(kind: str, slab_bytes: int, connection: Connection) -> None:
    """Until killed, or the pipe's other end is gone."""
    decoder = _Decoder(kind, slab_bytes)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(getattr(decoder, name)(*arguments))


class Peer:
    """The test's end: a method call for each command."""

    def __init__(self, kind: str, slab_bytes: int = SLAB_BYTES) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(kind, slab_bytes, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that a dead child ends the pipe
        self.region: Region = self.call("reset")

    def call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Idempotent."""
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join()
        self._pipe.close()
