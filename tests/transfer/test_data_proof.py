"""With a cluster key, connections for KV and features open with its proof: who knows a region's name alone gets no
byte of it, and a server that has not the key gets none either."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from epd_serve.protocol.wire import Region
from epd_serve.rpc.cluster import CallerGreeting
from epd_serve.rpc.messages import OPENING, Hello, Proof, Welcome, pack
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.tcp import Answer, Read, data_endpoint
from epd_serve.transfer.transport import PeerGone, TransferError

KEY, OTHER = "only-this-cluster-knows", "another-cluster's-key"
SECRET = b"[KV of somebody's prompt]!!"


class Guarded:
    """A transport with the key, which offers a slab that holds the secret."""

    def __init__(self) -> None:
        self.transport = EmbeddedTransport(path="tcp", key=KEY)
        self.slab = self.transport.allocate("slab", 64)
        self.slab.buffer[: len(SECRET)] = SECRET
        self.region = self.slab.region

    def read(self, key: str | None, region: Region | None = None) -> bytes:
        """Read there as a process with this key does."""
        into, peer = bytearray(len(SECRET)), EmbeddedTransport(path="tcp", key=key)
        try:
            peer.read(region or self.region, [(0, memoryview(into))])
        finally:
            peer.close()
        return bytes(into)

    def call(self) -> bytes:
        """The bytes of a call for the first four bytes of the slab."""
        return bytes(pack(Read(self.region.name, [(0, 4)])))

    def connection(self) -> socket.socket:
        return socket.create_connection((self.region.host, self.region.port), timeout=20)

    def untouched(self) -> bool:
        return bytes(self.slab.buffer[: len(SECRET)]) == SECRET


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    yield guarded
    guarded.transport.close()


class Between:
    """Passes the bytes of one connection on to ``target`` and keeps those of its caller."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.heard = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._listener.accept()[0] as caller, socket.create_connection(self._target) as server:

            def back() -> None:
                with suppress(OSError):
                    while data := server.recv(4096):
                        caller.sendall(data)
                with suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)

            answering = threading.Thread(target=back)
            answering.start()
            with suppress(OSError):
                while data := caller.recv(4096):
                    self.heard += data
                    server.sendall(data)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            answering.join()

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def rest(connection: socket.socket) -> bytes:
    """All that the server still says, up to its end of the connection."""
    said = b""
    with suppress(ConnectionError):
        while data := connection.recv(4096):
            said += data
    return said


def test_who_has_the_key_reads_over_one_connection_with_one_proof(guarded: Guarded) -> None:
    peer = EmbeddedTransport(path="tcp", key=KEY)
    for _ in range(3):
        into = bytearray(40)
        peer.read(guarded.region, [(0, memoryview(into))])
        assert into == SECRET + bytes(40 - len(SECRET))
    assert len(guarded.transport._server._known) == 1  # type: ignore[union-attr]
    peer.close()


def test_a_stranger_that_knows_the_name_is_refused(guarded: Guarded) -> None:
    with guarded.connection() as stranger:
        stranger.sendall(OPENING + bytes(pack(Hello("", ""))) + bytes(pack(Proof(""))) + guarded.call())
        said = rest(stranger)
    assert SECRET[:4] not in said and b"cluster_key" in said


def test_a_peer_without_the_key_or_with_another_one_is_told_so(guarded: Guarded) -> None:
    with pytest.raises(TransferError, match="asks for its deployment's cluster_key"):
        guarded.read(None)
    with pytest.raises(PeerGone, match="does not prove that it has this deployment's cluster_key"):
        guarded.read(OTHER)
    assert guarded.read(KEY) == SECRET


def test_no_name_goes_to_a_server_without_the_key() -> None:
    for key in (None, OTHER):
        offering, writing = EmbeddedTransport(path="tcp", key=key), EmbeddedTransport(path="tcp", key=KEY)
        slab = offering.allocate("slab", 64)
        between = Between((slab.region.host, slab.region.port))
        region = msgspec.structs.replace(slab.region, port=between.address[1])
        with pytest.raises(PeerGone, match="does not prove"):
            writing.read(region, [(0, memoryview(bytearray(8)))])
        between.close()
        assert region.name.encode() not in between.heard
        writing.close()
        offering.close()


def test_a_proof_that_was_overheard_opens_no_other_connection(guarded: Guarded) -> None:
    """The address that the region names is that of somebody who passes all on; he hears all of it."""
    region, port = guarded.region, guarded.region.port
    with guarded.connection() as ours:
        greeting = CallerGreeting(KEY, data_endpoint(region.host, port), "p0")
        hello = OPENING + bytes(pack(greeting.hello))
        ours.sendall(hello)
        welcome = msgspec.msgpack.decode(ours.recv(4096)[len(OPENING) + 4 :], type=Welcome)
        proof = bytes(pack(greeting.prove(welcome)))
        ours.sendall(proof + guarded.call())
        said = bytearray()
        while len(said) < len(pack(Answer())) + 4:
            said += ours.recv(4096)
        assert said == pack(Answer()) + SECRET[:4]
    with guarded.connection() as replayed:
        replayed.sendall(hello + proof + guarded.call())
        assert SECRET[:4] not in rest(replayed)


def test_who_passes_a_greeting_on_to_another_server_proves_nothing(guarded: Guarded) -> None:
    between = Between((guarded.region.host, guarded.region.port))
    elsewhere = msgspec.structs.replace(guarded.region, port=between.address[1])
    with pytest.raises(PeerGone, match="does not prove"):
        guarded.read(KEY, elsewhere)
    between.close()
    assert guarded.read(KEY) == SECRET


@pytest.mark.parametrize(
    "said",
    [OPENING[:5], OPENING, OPENING + bytes(pack(Hello("0" * 32, ""))), OPENING + bytes(pack(7)), b"\x07" * 50],
)
def test_half_a_greeting_and_a_wrong_one_open_nothing(guarded: Guarded, said: bytes) -> None:
    with guarded.connection() as stranger:
        stranger.sendall(said + guarded.call() if len(said) > len(OPENING) else said)
        if len(said) > len(OPENING):
            assert SECRET[:4] not in rest(stranger)
    assert guarded.read(KEY) == SECRET
