"""A process that stops itself in the middle of writing KV; here because a spawned process imports by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection

from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.transport import Piece

BLOCK_BYTES = 64


class Stalling(EmbeddedTransport):
    """Stops its process between the first half of a write and the second."""

    def write(self, region: wire.Region, pieces: Sequence[Piece], transfer_ids: Sequence[str] = ()) -> None:
        half = len(pieces) // 2
        super().write(region, pieces[:half], transfer_ids)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)  # another thread may have got the signal, and this one runs on for a moment
        super().write(region, pieces[half:], transfer_ids)


class Source:
    """Blocks full of ones."""

    region: wire.Region
    buffer = memoryview(b"")
    staged_cells = None

    def stage(self, layers: range, blocks: Sequence[int]) -> AbstractContextManager[Source]:
        return nullcontext(self)

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return BLOCK_BYTES * num_layers * num_blocks

    def spans(self, first: int, count: int) -> list[tuple[int, int]]:
        raise NotImplementedError

    def pieces(self, first: int, remote: Sequence[int], remote_num_blocks: int) -> list[Piece]:
        return [(block * BLOCK_BYTES, memoryview(b"\1" * BLOCK_BYTES)) for block in remote]


def write_kv(path: str, lease_s: float, connection: Connection) -> None:
    """Take a ReserveReply, write its blocks, answer with the transfer's error, "" where there was none."""
    transport = Stalling(path=path)  # type: ignore[arg-type]
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    target = wire.decode(connection.recv_bytes(), wire.ReserveReply)
    transfer = OutgoingTransfer("t", target=target, deadline=time.monotonic() + lease_s / 2)
    sender.push(range(1), [Part(transfer, target.block_ids, target.block_ids)])
    sender.fence(transfer, lambda: connection.send(str(transfer.error or "")))
    connection.recv_bytes()


def offer_region(connection: Connection) -> None:
    """Have a region until this process is killed."""
    slab = EmbeddedTransport(path="shm").allocate("kv", 64)
    connection.send_bytes(wire.encode(slab.region))
    time.sleep(60)
