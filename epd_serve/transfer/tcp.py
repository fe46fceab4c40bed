"""One-sided reads over TCP, for peers on different hosts.

A connection opens with the greeting of a link (:mod:`epd_serve.rpc.messages`): both ends prove the cluster key for
the address in the region. Reads follow, one at a time, in the frames of a link::

    reader → owner   Read
    owner → reader   Answer, then the raw bytes of all pieces

The reader names a region only after the owner has proved the key. The owner treats a connection as a stranger
until it has proved the key and named an existing region: names have 122 random bits and appear only in control
calls. A stranger is disconnected after STRANGER_S, or earlier to make room.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from epd_serve.errors import ServeError
from epd_serve.protocol.wire import Region
from epd_serve.rpc import sockets
from epd_serve.rpc.cluster import CallerGreeting, Endpoint, Refused, ServerGreeting
from epd_serve.rpc.messages import (
    HELLO,
    LENGTH,
    MAX_GREETING_BYTES,
    OPENING,
    PROOF,
    PROTOCOL,
    WELCOME,
    LinkClosed,
    pack,
)
from epd_serve.transfer.transport import HostPiece, PeerGone, TransferError, check_bounds

#: Pieces of one call; a longer list takes several calls.
MAX_PIECES = 4096
#: Limit of a call's frame and of the frame before an answer's bytes.
MAX_FRAME_BYTES = 1 << 17
#: Open connections; one more replaces a stranger, or else the longest idle connection.
MAX_CONNECTIONS = 256
#: Time in which a connection must name its first region.
STRANGER_S = 5.0
_ACCEPT_RETRY_S = 0.05

_Bytes = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")


class Read(msgspec.Struct, array_like=True, frozen=True):
    """A call for the pieces of a region, each (offset, nbytes)."""

    region: Annotated[str, msgspec.Meta(max_length=256)]
    pieces: Annotated[list[tuple[_Bytes, _Bytes]], msgspec.Meta(max_length=MAX_PIECES)]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The head of an answer; without a refusal the bytes follow."""

    refusal: str = ""


_READ, _ANSWER = msgspec.msgpack.Decoder(Read), msgspec.msgpack.Decoder(Answer)


def data_endpoint(host: str, port: int) -> Endpoint:
    """Return the endpoint that proofs are bound to: the data port's address as it stands in regions."""
    return Endpoint("data", f"{host}:{port}")


class TcpPeers:
    """Reads regions of other processes over pooled connections."""

    def __init__(self, timeout_s: float, key: str | None = None) -> None:
        self._timeout_s = timeout_s
        self._key = key
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}

    def read(self, region: Region, pieces: Sequence[HostPiece]) -> None:
        check_bounds(region, pieces)
        try:
            for start in range(0, max(1, len(pieces)), MAX_PIECES):
                self._read_once(region, pieces[start : start + MAX_PIECES])
        except ServeError as error:
            raise PeerGone(error.message) from error
        except OSError as error:
            raise PeerGone(f"transfer with {region.host}:{region.port} failed: {error}") from error

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _read_once(self, region: Region, pieces: Sequence[HostPiece]) -> None:
        pooled = self._take_idle(region)
        if pooled is not None:
            with suppress(ConnectionError):  # closed by the peer just now: reads can be repeated
                self._exchange(pooled, region, pieces)
                return
        connection = sockets.connect_blocking(region.host, region.port)
        try:
            connection.settimeout(self._timeout_s)
            reached = data_endpoint(region.host, region.port)
            greeting = CallerGreeting(self._key, reached, reached.address)
            connection.sendall(OPENING + pack(greeting.hello))
            _check_opening(connection)
            connection.sendall(pack(greeting.prove(_receive(connection, WELCOME, MAX_GREETING_BYTES))))
        except BaseException:
            connection.close()
            raise
        self._exchange(connection, region, pieces)

    def _take_idle(self, region: Region) -> socket.socket | None:
        """Take a connection from the pool; drop the ones that their peers have closed."""
        with self._lock:
            for address, connections in list(self._idle.items()):
                for connection in list(connections):
                    poll = select.poll()
                    poll.register(connection, select.POLLIN)
                    if poll.poll(0):  # an idle connection has nothing to read but its end
                        connection.close()
                        connections.remove(connection)
                if not connections:  # a restarted peer uses another port
                    del self._idle[address]
            pooled = self._idle.get((region.host, region.port))
            return pooled.pop() if pooled else None

    def _exchange(self, connection: socket.socket, region: Region, pieces: Sequence[HostPiece]) -> None:
        try:
            connection.sendall(pack(Read(region.name, [(offset, data.nbytes) for offset, data in pieces])))
            if refusal := _receive(connection, _ANSWER, MAX_FRAME_BYTES).refusal:
                raise TransferError(refusal)
            for _, data in pieces:
                _fill(connection, data)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault((region.host, region.port), []).append(connection)


@dataclass(eq=False, slots=True)
class _Peer:
    """A reader's connection.

    Attributes:
        is_stranger: whether it has yet to name an existing region.
        idle_since_s: when it connected or its last call ended; infinite during a call.
    """

    connection: socket.socket
    is_stranger: bool = True
    idle_since_s: float = field(default_factory=time.monotonic)

    def disconnect(self) -> None:
        """Shut the socket down, which ends its thread."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class TcpServer:
    """Serves memory that this process offers, with one thread for each connection.

    The other arguments are those of :class:`~epd_serve.transfer.embedded.EmbeddedTransport`.
    """

    def __init__(
        self,
        host: str,
        timeout_s: float,
        *,
        port: int = 0,
        advertise: str | None = None,
        key: str | None = None,
    ) -> None:
        self._offered: dict[str, memoryview] = {}
        self._key = key
        self._timeout_s = timeout_s
        self._listener = sockets.listen(host, port, "the transport (--data-port)")
        self.host: str = advertise or self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="transfer-accept", daemon=True).start()

    def offer(self, name: str, memory: memoryview) -> None:
        """Let peers read a region."""
        self._offered[name] = memory

    def withdraw(self, name: str) -> None:
        self._offered.pop(name, None)

    def close(self) -> None:
        self._offered.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closed = True
            for peer in self._peers:
                peer.disconnect()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # such as too many open files, which passes
                    time.sleep(_ACCEPT_RETRY_S)
                    continue
                peer = _Peer(connection)
                try:
                    if not self._make_room(peer):
                        connection.close()
                        continue
                    threading.Thread(target=self._serve, args=(peer,), name="transfer-serve", daemon=True).start()
                except RuntimeError:  # no more threads: the peer will retry
                    self._drop(peer)

    def _make_room(self, peer: _Peer) -> bool:
        """Add a peer, replacing an idle one if necessary; return False if all are busy."""
        with self._lock:
            if len(self._peers) >= MAX_CONNECTIONS:
                first = min(self._peers, key=lambda one: (not one.is_stranger, one.idle_since_s))
                if first.idle_since_s == math.inf:
                    return False
                self._peers.discard(first)
                first.disconnect()
            self._peers.add(peer)
            return not self._closed

    def _serve(self, peer: _Peer) -> None:
        connection = peer.connection
        try:
            sockets.watch(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            until_s = time.monotonic() + STRANGER_S
            self._greet(connection, until_s)
            call = _receive(connection, _READ, MAX_FRAME_BYTES, until_s)
            while self._answer(peer, call):
                peer.idle_since_s = time.monotonic()
                connection.settimeout(None)
                call = _receive(connection, _READ, MAX_FRAME_BYTES)
        except OSError:
            pass  # the peer left or is a stranger
        finally:
            self._drop(peer)

    def _greet(self, connection: socket.socket, until_s: float) -> None:
        greeting = ServerGreeting(self._key, [data_endpoint(self.host, self.port)])
        _check_opening(connection, until_s)
        try:
            welcome = greeting.answer(_receive(connection, HELLO, MAX_GREETING_BYTES, until_s))
            connection.sendall(OPENING + pack(welcome))
            greeting.check(_receive(connection, PROOF, MAX_GREETING_BYTES, until_s))
        except Refused as error:
            connection.sendall(OPENING + pack(error.message))
            raise LinkClosed(str(error)) from error

    def _answer(self, peer: _Peer, call: Read) -> bool:
        """Send the pieces or a refusal; return whether the pieces were sent."""
        connection, slab = peer.connection, self._offered.get(call.region)
        connection.settimeout(self._timeout_s)  # or a lost host would hold the view forever
        refusal = ""
        if slab is None:
            refusal = f"region {call.region} does not exist"
        elif any(offset + nbytes > slab.nbytes for offset, nbytes in call.pieces):
            refusal = f"a piece lies outside region {call.region}"
        elif sum(nbytes for _, nbytes in call.pieces) > slab.nbytes:
            refusal = f"the pieces are larger than region {call.region}"
        connection.sendall(pack(Answer(refusal)))
        if slab is None or refusal:
            return False
        peer.is_stranger, peer.idle_since_s = False, math.inf
        for offset, nbytes in call.pieces:
            connection.sendall(slab[offset : offset + nbytes])
        return True

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.discard(peer)
        peer.connection.close()


def _check_opening(connection: socket.socket, until_s: float = math.inf) -> None:
    """Raise LinkClosed or another OSError unless the peer sends a link's opening."""
    if _receive_bytes(connection, len(OPENING), until_s) != OPENING:
        raise LinkClosed(f"the peer does not speak {PROTOCOL}")


def _receive(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[T], max_bytes: int, until_s: float = math.inf
) -> T:
    """Return the message of the next frame. Raises LinkClosed and other OSErrors."""
    num_bytes: int = LENGTH.unpack(_receive_bytes(connection, LENGTH.size, until_s))[0]
    if num_bytes > max_bytes:
        raise LinkClosed(f"a message of {num_bytes} bytes exceeds the limit of {max_bytes}")
    try:
        return decoder.decode(_receive_bytes(connection, num_bytes, until_s))
    except ValueError as error:  # also invalid UTF-8
        raise LinkClosed(f"invalid {PROTOCOL} message: {error}") from error


def _receive_bytes(connection: socket.socket, count: int, until_s: float) -> bytearray:
    data = bytearray(count)
    _fill(connection, memoryview(data), until_s)
    return data


def _fill(connection: socket.socket, into: memoryview, until_s: float = math.inf) -> None:
    filled = 0
    while filled < into.nbytes:
        if until_s < math.inf:
            connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        count = connection.recv_into(into[filled:])
        if count == 0:
            raise LinkClosed("the peer closed the connection within a message")
        filled += count
