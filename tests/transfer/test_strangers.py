"""Connections to the data plane from those that were told no region or lack the cluster key."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import psutil
import pytest
from program import wait_until

from epd_serve.protocol.wire import Region
from epd_serve.rpc.messages import LENGTH, OPENING, Hello, Proof, Welcome, pack
from epd_serve.transfer import tcp
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.tcp import MAX_FRAME_BYTES, MAX_PIECES, Read, TcpPeers
from epd_serve.transfer.transport import PeerGone, Slab, TransferError

SIZE = 64 * 1024
MIB = 1024**2
HELLO = OPENING + bytes(pack(Hello("", "")))
GREETING = HELLO + bytes(pack(Proof("")))
KEY, OTHER = "only-this-cluster-knows", "another-cluster's-key"
SECRET = b"[KV of somebody's prompt]!!"


class Served:
    """A transport that offers a slab, and another one that knows it."""

    def __init__(self, key: str | None = None) -> None:
        self.here, self.there = (EmbeddedTransport(path="tcp", key=key) for _ in range(2))
        self.slab: Slab = self.there.allocate("slab", SIZE)
        self.slab.buffer[: len(SECRET)] = SECRET
        self.region = self.slab.region

    def stranger(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection((self.region.host, self.region.port), timeout=60)
        connection.sendall(data)
        return connection

    def works(self) -> None:
        self.slab.buffer[:4] = b"fine"
        data = bytearray(4)
        self.here.read(self.region, [(0, memoryview(data))])
        assert data == b"fine"

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(getattr(request, "param", None))
    yield served
    served.close()


with_key = pytest.mark.parametrize("served", [KEY], indirect=True)


def is_over(connection: socket.socket) -> bool:
    """Whether the server has ended the connection; a refusal may come before that."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_frames_of_strangers_cost_nothing_whatever_they_announce(served: Served) -> None:
    process = psutil.Process()
    served.works()
    rss, num_threads = process.memory_info().rss, threading.active_count()
    frames = [
        OPENING + LENGTH.pack(1 << 30),
        GREETING + LENGTH.pack(1 << 30),
        GREETING + bytes(pack(Read("y" * 300, []))),
        GREETING + bytes(pack(Read("slab", [(0, 1 << 40)]))),
        GREETING + LENGTH.pack(MAX_FRAME_BYTES) + b"x" * 300,
    ]
    strangers = [served.stranger(frame) for frame in frames for _ in range(15)]
    peak, deadline = 0, time.monotonic() + 1.0
    while time.monotonic() < deadline:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.02)
    assert peak - rss < 16 * MIB
    assert threading.active_count() <= num_threads + 15, "those that have not said all"
    served.works()
    assert all(is_over(one) for one in strangers[:60]), "none of these names is a region's"
    for one in strangers:
        one.close()


def test_a_message_that_is_no_utf8_ends_its_connection(served: Served) -> None:
    with served.stranger(GREETING + pack(Read("name", [])).replace(b"name", b"\xffame")) as stranger:
        assert len(rest(stranger)) == len(OPENING + pack(Welcome("", "")))
    served.works()


def test_silent_strangers_make_room_and_do_not_stay(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STRANGER_S", 3.0)
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 32)
    num_threads, num_files = threading.active_count(), psutil.Process().num_fds()
    strangers = [served.stranger() for _ in range(300)]
    served.works()
    wait_until(
        lambda: psutil.Process().num_fds() <= num_files + 300 + 32 + 4,
        "the older ones are turned away",
    )
    assert threading.active_count() <= num_threads + 1 + 32
    assert all(is_over(one) for one in strangers)
    served.works()
    for one in strangers:
        one.close()


def test_of_many_that_read_the_longest_idle_gives_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 3)
    peers = [EmbeddedTransport(path="tcp") for _ in range(8)]
    served.slab.buffer[:8] = bytes(range(8))
    for _ in range(2):  # those that gave way come again
        for number, peer in enumerate(peers):
            data = bytearray(1)
            peer.read(served.region, [(number, memoryview(data))])
            assert data[0] == number
    wait_until(lambda: len(served.there._server._peers) <= 3, "no more than three are kept")  # type: ignore[union-attr]
    for peer in peers:
        peer.close()


def test_a_long_list_of_pieces_goes_in_several_calls(served: Served) -> None:
    served.slab.buffer[:] = (bytes(range(251)) * SIZE)[:SIZE]
    data = bytearray(3 * MAX_PIECES + 5)
    served.here.read(
        served.region, [(4 * index, memoryview(data)[index : index + 1]) for index in range(len(data))]
    )
    assert all(byte == 4 * index % 251 for index, byte in enumerate(data))


def read_with(key: str | None, region: Region) -> bytes:
    """Read the secret as a process with this key does."""
    into, peer = bytearray(len(SECRET)), EmbeddedTransport(path="tcp", key=key)
    try:
        peer.read(region, [(0, memoryview(into))])
    finally:
        peer.close()
    return bytes(into)


def rest(connection: socket.socket) -> bytes:
    """All that the other end still says, up to its end of the connection."""
    said = b""
    with suppress(ConnectionError):
        while data := connection.recv(4096):
            said += data
    return said


@with_key
def test_only_who_has_the_key_reads(served: Served) -> None:
    assert read_with(KEY, served.region) == SECRET
    between = msgspec.structs.replace(served.region, host="localhost")
    for key, region in ((None, served.region), (OTHER, served.region), (KEY, between)):
        with pytest.raises(PeerGone, match=r"cluster_key|a proxy in between"):
            read_with(key, region)


@with_key
@pytest.mark.parametrize("said", [HELLO + pack(Proof("")), HELLO, OPENING + pack(7), OPENING, b"", b"\7" * 50])
def test_half_a_greeting_and_a_wrong_one_open_nothing(served: Served, said: bytes) -> None:
    with served.stranger(said + bytes(pack(Read(served.region.name, [(0, 4)])))) as stranger:
        with suppress(OSError):  # it may have turned us away
            stranger.shutdown(socket.SHUT_WR)
        assert SECRET[:4] not in rest(stranger)
    assert read_with(KEY, served.region) == SECRET


@with_key
def test_no_name_goes_to_a_server_without_the_key(served: Served) -> None:
    heard = bytearray()

    def answer() -> None:
        with listener.accept()[0] as caller:
            caller.sendall(OPENING + pack(Welcome("", "")))
            heard.extend(rest(caller))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        region = msgspec.structs.replace(served.region, port=listener.getsockname()[1])
        with pytest.raises(PeerGone, match="does not prove"):
            read_with(KEY, region)
        thread.join()
    assert heard.startswith(OPENING) and region.name.encode() not in heard


def test_an_answer_without_end_is_not_waited_for() -> None:
    """The address of an instance that was lost may be another process's by now."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def answer() -> None:
        held.append(listener.accept()[0])
        held[0].sendall(OPENING + pack(Welcome("", "")) + LENGTH.pack(0xFFFFFFFF))

    thread = threading.Thread(target=answer)
    thread.start()
    peers = TcpPeers(60.0)
    region = Region(name="kv", nbytes=8, host_id="", pid=1, fd=1, host="127.0.0.1", port=listener.getsockname()[1])
    with pytest.raises(TransferError, match="a message of 4294967295 bytes"):
        peers.read(region, [])
    thread.join()
    peers.close()
    held[0].close()
    listener.close()
