"""Writes over a connection: what is on its way when its transfer ends gets nowhere, or is waited for."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from fleet import wait_until

from epd_serve.cache.block_pool import BlockPool
from epd_serve.protocol.wire import KVLayout, Region, ReserveRequest
from epd_serve.transfer.reservation import ReservationTable
from epd_serve.transfer.tcp import HEADER, PIECE, TcpPeers, TcpServer
from epd_serve.transfer.transport import TransferError, WriteGate

TIMEOUT_S = 1.5
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32", model="m")


def test_who_is_inside_is_known_and_who_is_shut_out_stays_out() -> None:
    gate = WriteGate()
    gate.open("a")
    gate.open("b")
    with gate.passing(["a", "b"]) as first, gate.passing(["a"]) as second:
        gate.shut("a")
        assert (first, second, gate.is_inside("a"), gate.is_inside("b")) == (True, True, True, True)
        with gate.passing(["b", "a"]) as late:
            assert not late
    assert not gate.is_inside("a")
    with gate.passing([]) as nameless:
        assert nameless, "what is no transfer's is nobody's to stop"


def test_blocks_wait_for_bytes_that_are_coming_in_and_a_silent_writer_is_cut_off() -> None:
    gate, slab = WriteGate(), memoryview(bytearray(64))
    server = TcpServer("127.0.0.1", lambda name: slab, gate, TIMEOUT_S)
    pool = BlockPool(16, 4)
    table = ReservationTable(free=lambda blocks: pool.release(blocks.all()), gate=gate)
    reservation = table.open(ReserveRequest("t", "r", 7, 1, 1, [], LAYOUT, 30.0), 0.0)
    assert reservation is not None
    table.grant(reservation, pool.allocate_request(7, 1), 0.0)
    with socket.create_connection((server.host, server.port)) as writer:
        writer.sendall(HEADER.pack(1, 2, 1, 1) + b"kv" + b"t" + PIECE.pack(0, 32) + b"x" * 16)
        wait_until(lambda: bytes(slab[:16]) == b"x" * 16, "half of it is there")
        assert table.complete("t") is None, "not all is written"
        table.stop_writing("t")
        table.expire(1e9)
        assert pool.num_free == pool.capacity - 2
        wait_until(lambda: not gate.is_inside("t"), "a writer that sends nothing is gone", 10 * TIMEOUT_S)
        assert writer.recv(1) == b""
    table.expire(1.0)
    assert pool.num_free == pool.capacity
    table.check_integrity()
    server.close()


def test_a_write_that_timed_out_is_not_repeated() -> None:
    """The first may lie unread in the peer's socket, and be read when the second has long been confirmed."""
    listener = socket.create_server(("127.0.0.1", 0))
    peers = TcpPeers(TIMEOUT_S)
    region = Region(name="kv", nbytes=8, host_id="", pid=1, fd=1, host="127.0.0.1", port=listener.getsockname()[1])
    accepted: list[socket.socket] = []

    def answer_once() -> None:
        accepted.append(listener.accept()[0])
        accepted[0].recv(1024)
        accepted[0].sendall(bytes(5))

    thread = threading.Thread(target=answer_once)
    thread.start()
    peers.write(region, [], [])
    thread.join()
    started = time.monotonic()
    with pytest.raises(TransferError, match="timed out"):
        peers.write(region, [(0, memoryview(b"stalled"))], [])
    assert time.monotonic() - started < 20 * TIMEOUT_S
    listener.settimeout(0.1)
    with pytest.raises(TimeoutError):
        listener.accept()
    peers.close()
    accepted[0].close()
    listener.close()
