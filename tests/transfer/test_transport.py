"""Every transport: what one side has the other side reads, and nothing goes out of bounds."""

import gc
import mmap
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from own_ports import free_port
from program import wait_until
from transfer_peer import Peer
from transports import fill, kinds, make_transport, mooncake_options, needs_mooncake

from epd_serve.protocol.wire import Region
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.mooncake.engine import address_of
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.shared_memory import SharedSlab
from epd_serve.transfer.transport import TransferError, Transport

SIZE = 4096
STALLED_BYTES = 64 * 1024**2  # far more than sockets buffer


@pytest.fixture(scope="module", params=kinds("shm", "tcp", "auto", "mooncake"))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    here, there = make_transport(request.param), make_transport(request.param)
    yield here, there
    here.close()
    there.close()


def read(transport: Transport, region: Region, nbytes: int = 4) -> bytes:
    """The first bytes of a region."""
    data = bytearray(nbytes)
    transport.read(region, [(0, memoryview(data))])
    return bytes(data)


@pytest.mark.parametrize("kind", kinds("tcp", "mooncake", "mooncake device"))
def test_a_peer_checks_bounds_itself(kind: str) -> None:
    here, there = make_transport(kind), make_transport(kind)
    slab = there.allocate("slab", 64)
    region = slab.region
    lying = msgspec.structs.replace(region, nbytes=1 << 20)
    with pytest.raises(TransferError):
        here.read(lying, [(60, memoryview(bytearray(8)))])
    unknown = msgspec.structs.replace(region, name="nobody")
    with pytest.raises(TransferError):
        here.read(unknown, [(0, memoryview(bytearray(8)))])
    fill(slab, 0, b"fine")
    assert read(here, region) == b"fine"  # the transport survives refusals
    here.close()
    there.close()


def test_concurrent_readers_do_not_mix(pair: tuple[Transport, Transport]) -> None:
    here, there = pair
    slab = there.allocate("slab", SIZE)
    part = SIZE // 4
    slab.buffer[:] = b"".join(bytes([i + 1]) * part for i in range(4))
    found: list[bool] = []

    def read_part(i: int) -> None:
        for _ in range(20):
            data = bytearray(part)
            here.read(slab.region, [(i * part, memoryview(data))])
            found.append(data == bytes([i + 1]) * part)

    threads = [threading.Thread(target=read_part, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


@pytest.mark.parametrize("kind", kinds("tcp", "mooncake"))
def test_peers_that_stall_are_given_up_and_hold_up_nobody_else(kind: str) -> None:
    """Where one stops before the first contact, its kernel still accepts connections for it."""
    known, unknown, fine = (Peer(kind, STALLED_BYTES) for _ in range(3))
    here = make_transport(kind)
    mine = here.allocate("mine", STALLED_BYTES)
    fine.fill(0, b"fine")
    read(here, known.region)
    errors, num_read = list[Exception](), 0

    def fail(peer: Peer) -> None:
        try:
            here.read(peer.region, [(0, mine.buffer)])
        except TransferError as error:
            errors.append(error)

    threads = [threading.Thread(target=fail, args=(peer,)) for peer in (known, unknown)]
    for peer, thread in zip((known, unknown), threads, strict=True):
        peer.signal(signal.SIGSTOP)
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read(here, fine.region) == b"fine"
        num_read += 1
    assert num_read > 10 and len(errors) == 2, "the fine one is read all the while"
    for peer in (known, unknown, fine):
        peer.kill()
    here.close()


def test_what_is_read_from_a_peer_does_not_stay_in_the_readers_memory() -> None:
    nbytes = 16 << 20
    transport = make_transport("shm")
    slab = transport.allocate("slab", nbytes)
    slab.buffer[:] = bytes(range(256)) * (nbytes // 256)  # the owner's own view: all of it is resident once
    back = bytearray(nbytes - 5000)
    for start in range(0, len(back), 64_000):  # piece by piece, as features come
        end = min(start + 64_000, len(back))
        transport.read(slab.region, [(start, memoryview(back)[start:end])])
    assert back == slab.buffer[: len(back)]
    resident = 0
    for part in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        if f"memfd:{slab.region.name}" in part:
            resident += int(part.split("\nRss:")[1].split()[0]) << 10
    assert nbytes <= resident <= nbytes + (128 << 10)
    transport.close()


def test_memory_of_a_peer_that_is_gone_is_unmapped() -> None:
    """Or a dead instance's memory would stay in use until another one is read."""
    here, there = make_transport("shm"), make_transport("shm")
    region = there.allocate("slab", SIZE).region
    read(here, region)
    there.close()
    wait_until(lambda: region.name not in Path("/proc/self/maps").read_text(), "nothing is mapped")
    here.close()


def test_a_server_that_ran_out_of_descriptors_accepts_again() -> None:
    here, there = EmbeddedTransport(path="tcp"), EmbeddedTransport(path="tcp")
    region = there.allocate("slab", 8).region
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        client.connect((region.host, region.port))
        time.sleep(0.2)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    client.close()
    assert read(here, region) == bytes(4)
    here.close()
    there.close()


@pytest.mark.parametrize("alignment", [1, 4096, 2 * 1024**2])
def test_a_slab_begins_where_its_transport_needs_it_and_goes_with_its_last_view(alignment: int) -> None:
    slab = SharedSlab("slab", 3 * SIZE, alignment=alignment)
    assert address_of(slab.buffer) % alignment == 0
    view = slab.buffer[SIZE : 2 * SIZE]
    view[:] = b"y" * SIZE
    with Path(f"/proc/self/fd/{slab.region.fd}").open("rb") as file:
        assert mmap.mmap(file.fileno(), 3 * SIZE, access=mmap.ACCESS_READ)[SIZE : 2 * SIZE] == bytes(view)
    name = slab.region.name
    slab.close()
    del slab
    assert name in Path("/proc/self/maps").read_text()
    assert bytes(view) == b"y" * SIZE
    del view
    assert name not in Path("/proc/self/maps").read_text()


@needs_mooncake
def test_mooncake_listens_on_the_loopback_device_alone_where_its_host_is_one() -> None:
    before = {connection.laddr for connection in psutil.Process().net_connections("tcp")}
    transport = MooncakeTransport(mooncake_options())
    ours = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr not in before]
    everywhere = [c for c in ours if c.laddr.ip in ("0.0.0.0", "::")]
    assert len(everywhere) == 2, "the engine's, for the handshake and for the data"
    assert all(_device_of(c.fd) == b"lo" for c in everywhere)
    assert {c.laddr.ip for c in ours if c not in everywhere} == {"127.0.0.1"}
    transport.close()


def _device_of(descriptor: int) -> bytes:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        return listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


@needs_mooncake
def test_a_closed_mooncake_transport_gives_back_everything() -> None:
    process = psutil.Process()
    MooncakeTransport(mooncake_options()).close()  # what is loaded once stays
    before = (len(process.net_connections("tcp")), process.num_fds())
    for _ in range(3):
        transport = MooncakeTransport(mooncake_options())
        region = transport.allocate("kv", SIZE).region
        transport.close()
        transport.close()
        del transport

    def is_back() -> bool:
        gc.collect()
        kept = region.name in Path("/proc/self/maps").read_text()
        now = (len(process.net_connections("tcp")), process.num_fds())
        return not kept and now[0] <= before[0] and now[1] <= before[1]

    wait_until(is_back, "sockets, files and memory are given back")


def test_connections_to_peers_that_were_restarted_are_closed() -> None:
    here = EmbeddedTransport(path="tcp")
    gone: set[int] = set()

    def connected() -> list[str]:
        every = psutil.Process().net_connections("tcp")
        return [one.status for one in every if one.raddr and one.raddr.port in gone]

    for _ in range(5):
        there = EmbeddedTransport(path="tcp")
        region = there.allocate("slab", 8).region
        read(here, region)
        there.close()
        gone.add(region.port)
    last = EmbeddedTransport(path="tcp")
    region = last.allocate("slab", 8).region
    read(here, region)
    assert connected() == []
    last.close()
    here.close()
    gone.add(region.port)
    wait_until(lambda: connected() == [], "no connection is left")


def test_peers_use_the_address_that_is_advertised() -> None:
    port = free_port("0.0.0.0")
    there = EmbeddedTransport("0.0.0.0", "tcp", port=port, advertise="localhost")
    here = EmbeddedTransport(path="tcp")
    slab = there.allocate("there", SIZE)
    assert (slab.region.host, slab.region.port) == ("localhost", port)
    fill(slab, 0, b"fine")
    assert read(here, slab.region) == b"fine"
    here.close()
    there.close()
