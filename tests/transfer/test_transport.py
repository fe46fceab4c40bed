"""One contract for every transport: what one side writes the other side has, and nothing goes out of bounds."""

import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slab_server import SIZE, serve_slab

from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.embedded import Path as TransportPath
from epd_serve.transfer.transport import TransferError, Transport


@pytest.fixture(scope="module", params=["shm", "tcp", "auto"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    path: TransportPath = request.param
    here, there = EmbeddedTransport(path=path), EmbeddedTransport(path=path)
    yield here, there
    here.close()
    there.close()


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.binary(min_size=1, max_size=300)), min_size=1, max_size=8
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_written_bytes_are_there_and_can_be_read_back(
    pair: tuple[Transport, Transport], pieces: list[tuple[int, bytes]]
) -> None:
    here, there = pair
    slab = there.allocate("slab", SIZE)
    model = bytearray(SIZE)
    inside = [(offset, data[: SIZE - offset]) for offset, data in pieces]
    for offset, data in inside:
        model[offset : offset + len(data)] = data
    here.write(slab.region, [(offset, memoryview(data)) for offset, data in inside])
    assert bytes(slab.buffer) == bytes(model)
    back = bytearray(SIZE)
    here.read(slab.region, [(0, memoryview(back)[:100]), (100, memoryview(back)[100:])])
    assert back == model


@pytest.mark.parametrize(("offset", "nbytes"), [(SIZE - 3, 4), (SIZE + 1, 1), (-1, 1)])
def test_out_of_bounds_is_refused(pair: tuple[Transport, Transport], offset: int, nbytes: int) -> None:
    here, there = pair
    region = there.allocate("slab", SIZE).region
    with pytest.raises(TransferError, match="outside region"):
        here.write(region, [(offset, memoryview(bytes(nbytes)))])
    with pytest.raises(TransferError, match="outside region"):
        here.read(region, [(offset, memoryview(bytearray(nbytes)))])


def test_a_tcp_peer_checks_bounds_itself() -> None:
    here, there = EmbeddedTransport(path="tcp"), EmbeddedTransport(path="tcp")
    region = there.allocate("slab", 64).region
    lying = wire.Region(**{name: getattr(region, name) for name in region.__struct_fields__} | {"nbytes": 1 << 20})
    with pytest.raises(TransferError):
        here.write(lying, [(60, memoryview(b"12345678"))])
    unknown = wire.Region(
        **{name: getattr(region, name) for name in region.__struct_fields__} | {"name": "nobody"}
    )
    with pytest.raises(TransferError):
        here.read(unknown, [(0, memoryview(bytearray(8)))])
    here.write(region, [(0, memoryview(b"fine"))])  # the transport survives refusals
    here.close()
    there.close()


def test_concurrent_writers_do_not_mix(pair: tuple[Transport, Transport]) -> None:
    here, there = pair
    slab = there.allocate("slab", SIZE)
    part = SIZE // 4

    def write(i: int) -> None:
        for _ in range(20):
            here.write(slab.region, [(i * part, memoryview(bytes([i + 1]) * part))])

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bytes(slab.buffer) == b"".join(bytes([i + 1]) * part for i in range(4))


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_between_processes_and_after_the_peer_was_killed(path: TransportPath) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_slab, args=(path, theirs))
    process.start()
    theirs.close()  # so that a dead child ends the pipe
    region = wire.decode(ours.recv_bytes(), wire.Region)
    transport = EmbeddedTransport(path=path)
    data = bytearray(5)
    transport.read(region, [(0, memoryview(data))])
    assert data == b"hello"
    transport.write(region, [(5, memoryview(b" world"))])
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    fresh = EmbeddedTransport(path=path)
    with pytest.raises(TransferError):
        fresh.read(region, [(0, memoryview(data))])
    transport.close()
    fresh.close()
    ours.close()


def test_nothing_is_left_in_dev_shm() -> None:
    before = set(Path("/dev/shm").iterdir())
    transport = EmbeddedTransport()
    transport.allocate("slab", SIZE)
    assert set(Path("/dev/shm").iterdir()) == before
    transport.close()


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
    here.write(region, [(0, memoryview(b"fine"))])
    here.close()
    there.close()
