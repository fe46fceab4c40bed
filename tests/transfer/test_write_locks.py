"""A writer that is stopped in the middle of a copy, for longer than its lease, harms nobody, on any host."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec
import psutil
import pytest
from stalling_writer import BLOCK_BYTES, offer_region, write_kv

from epd_serve.cache.block_pool import BlockPool
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.embedded import Path as TransportPath
from epd_serve.transfer.reservation import ReservationState, ReservationTable
from epd_serve.transfer.shared_memory import WriteLocks, is_being_written
from epd_serve.transfer.transport import TransferError

LEASE_S = 120.0
LAYOUT = wire.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32", model="m")


@dataclass
class Stalled:
    """A writer in the middle of a write, and the books of the side that it writes to."""

    place: str
    writer: SpawnProcess
    connection: Connection
    pool: BlockPool
    table: ReservationTable
    memory: memoryview


@pytest.fixture(params=["shm", "tcp", "another host"])
def stalled(request: pytest.FixtureRequest) -> Iterator[Stalled]:
    path: TransportPath = "shm" if request.param == "shm" else "tcp"
    transport = EmbeddedTransport(path=path)
    slab = transport.allocate("kv", 16 * BLOCK_BYTES)
    pool = BlockPool(16, 4)
    table = ReservationTable(
        free=lambda blocks: pool.release(blocks.all()),
        is_being_written=lambda block: is_being_written(slab.region, block),
        gate=transport.gate,
    )
    region = slab.region
    if request.param == "another host":
        region = msgspec.structs.replace(region, host_id="another")
    reservation = table.open(
        wire.ReserveRequest(
            transfer_id="t",
            request_id="r",
            num_prompt_tokens=30,
            max_tokens=2,
            num_sequences=1,
            block_hashes=[],
            layout=LAYOUT,
            lease_s=LEASE_S,
        ),
        time.monotonic(),
    )
    assert reservation is not None
    blocks = pool.allocate_request(30, 2)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=write_kv, args=(path, LEASE_S, theirs))
    writer.start()
    table.grant(reservation, blocks, time.monotonic())
    ours.send_bytes(
        wire.encode(wire.ReserveReply(block_ids=blocks.root, num_cached_blocks=0, region=region, num_blocks=16))
    )
    half = 4 * BLOCK_BYTES
    while bytes(slab.buffer).count(1) < half or psutil.Process(writer.pid).status() != psutil.STATUS_STOPPED:
        table.renew("t", time.monotonic())
        time.sleep(0.01)
    yield Stalled(request.param, writer, ours, pool, table, slab.buffer)
    writer.kill()
    writer.join()
    transport.close()


def test_blocks_in_the_middle_of_a_write_are_not_given_to_anybody(stalled: Stalled) -> None:
    late = time.monotonic() + 10 * LEASE_S
    (wanted,) = stalled.table.expire(late)
    assert bytes(stalled.memory).count(1) == 4 * BLOCK_BYTES, "the test stops it in the middle"
    if stalled.place == "another host":
        assert stalled.pool.num_free == stalled.pool.capacity, "nothing is under way, and nothing more comes in"
    else:
        assert wanted.state is ReservationState.QUARANTINED, "the request has failed, its blocks are out of use"
        assert stalled.table.expire(late) == []
        assert stalled.pool.num_free == stalled.pool.capacity - 8
    assert stalled.writer.pid is not None
    os.kill(stalled.writer.pid, signal.SIGCONT)
    if stalled.place == "shm":
        assert stalled.connection.recv() == ""
        assert bytes(stalled.memory).count(1) == 8 * BLOCK_BYTES, "the rest was written after the lease"
    else:
        assert stalled.connection.recv(), "refused, or cut off while the refusal is on its way"
        assert bytes(stalled.memory).count(1) == 4 * BLOCK_BYTES
    stalled.table.expire(late)
    assert stalled.pool.num_free == stalled.pool.capacity
    stalled.table.check_integrity()


def test_a_writer_that_dies_in_the_middle_gives_its_blocks_back(stalled: Stalled) -> None:
    late = time.monotonic() + 10 * LEASE_S
    stalled.table.expire(late)
    stalled.writer.kill()
    stalled.writer.join()
    stalled.table.expire(late)
    assert stalled.pool.num_free == stalled.pool.capacity


def test_a_lock_file_is_not_closed_under_the_hands_of_its_holder() -> None:
    """Those of dead processes go when a new region is opened, which may be in the middle of another's write."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=offer_region, args=(theirs,))
    owner.start()
    region = wire.decode(ours.recv_bytes(), wire.Region)
    transport, locks = EmbeddedTransport(path="shm"), WriteLocks()
    with locks.held(region, [3]):
        owner.kill()
        owner.join()
        with locks.held(transport.allocate("kv", 64).region, [3]):
            pass
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not any(region.name in link for link in links)
    locks.close()
    transport.close()


def test_locks_are_of_one_slot_and_one_region() -> None:
    transport, locks = EmbeddedTransport(path="shm"), WriteLocks()
    one, other = (transport.allocate("kv", 64).region for _ in range(2))
    with locks.held(one, [3, 5]):
        held = [slot for slot in range(8) if is_being_written(one, slot)]
        assert held == [3, 5]
        assert not any(is_being_written(other, slot) for slot in range(8))
    assert not any(is_being_written(one, slot) for slot in range(8))
    with pytest.raises(ZeroDivisionError), locks.held(one, [3]):
        raise ZeroDivisionError
    assert not is_being_written(one, 3)
    locks.close()
    transport.close()


def test_a_process_that_may_not_be_looked_into_has_no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, locks = EmbeddedTransport(path="tcp"), WriteLocks()
    region = transport.allocate("kv", 64).region

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with locks.held(region, [3]):
        assert not is_being_written(region, 3)
    transport.close()


def test_a_region_that_is_gone_is_a_transfer_error_and_one_elsewhere_has_no_locks() -> None:
    region = wire.Region(name="kv", nbytes=1, host_id="", pid=1 << 22, fd=3, host="", port=0)
    locks = WriteLocks()
    with locks.held(region, [1]):
        pass
    here = EmbeddedTransport(path="shm").allocate("kv", 1).region
    gone = wire.Region(**{name: getattr(here, name) for name in here.__struct_fields__} | {"pid": 1 << 22})
    with pytest.raises(TransferError), locks.held(gone, [1]):
        pass
