"""With a cluster key, connections for KV and features open with its proof: who knows a region's name alone gets no
byte of it, and a server that has not the key gets none either.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from epd_serve.protocol.wire import Region
from epd_serve.rpc.messages import OPENING, Hello, Proof, Welcome, pack
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.tcp import Read
from epd_serve.transfer.transport import PeerGone

KEY, OTHER = "only-this-cluster-knows", "another-cluster's-key"
SECRET = b"[KV of somebody's prompt]!!"
HELLO = OPENING + bytes(pack(Hello("", "")))


class Guarded:
    """A transport with the key, which offers a slab that holds the secret."""

    def __init__(self) -> None:
        self.transport = EmbeddedTransport(path="tcp", key=KEY)
        self.slab = self.transport.allocate("slab", 64)
        self.slab.buffer[: len(SECRET)] = SECRET
        self.region = self.slab.region
        self.call = bytes(pack(Read(self.region.name, [(0, 4)])))

    def read(self, key: str | None, region: Region | None = None) -> bytes:
        """Read there as a process with this key does."""
        into, peer = bytearray(len(SECRET)), EmbeddedTransport(path="tcp", key=key)
        try:
            peer.read(region or self.region, [(0, memoryview(into))])
        finally:
            peer.close()
        return bytes(into)

    def connection(self) -> socket.socket:
        return socket.create_connection((self.region.host, self.region.port), timeout=20)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    yield guarded
    guarded.transport.close()


def rest(connection: socket.socket) -> bytes:
    """All that the server still says, up to its end of the connection."""
    said = b""
    with suppress(ConnectionError):
        while data := connection.recv(4096):
            said += data
    return said


def test_who_has_the_key_reads_and_others_are_told_so(guarded: Guarded) -> None:
    assert guarded.read(KEY) == SECRET
    with pytest.raises(PeerGone, match="asks for its deployment's cluster_key"):
        guarded.read(None)
    with pytest.raises(PeerGone, match="does not prove that it has this deployment's cluster_key"):
        guarded.read(OTHER)
    with pytest.raises(PeerGone, match="a proxy in between"):
        guarded.read(KEY, msgspec.structs.replace(guarded.region, host="localhost"))


def test_no_name_goes_to_a_server_without_the_key(guarded: Guarded) -> None:
    heard = bytearray()

    def answer() -> None:
        with listener.accept()[0] as caller:
            caller.sendall(OPENING + pack(Welcome("", "")))
            heard.extend(rest(caller))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        region = msgspec.structs.replace(guarded.region, port=listener.getsockname()[1])
        with pytest.raises(PeerGone, match="does not prove"):
            guarded.read(KEY, region)
        thread.join()
    assert heard.startswith(OPENING) and region.name.encode() not in heard


@pytest.mark.parametrize("said", [HELLO + pack(Proof("")), HELLO, OPENING + pack(7), OPENING, b"", b"\7" * 50])
def test_half_a_greeting_and_a_wrong_one_open_nothing(guarded: Guarded, said: bytes) -> None:
    with guarded.connection() as stranger:
        stranger.sendall(said + guarded.call)
        with suppress(OSError):  # it may have turned us away
            stranger.shutdown(socket.SHUT_WR)
        assert SECRET[:4] not in rest(stranger)
    assert guarded.read(KEY) == SECRET
