"""One-sided reads over TCP, for peers on different hosts.

A connection opens with the greeting of a link (:mod:`epd_serve.rpc.messages`), in which both ends prove the
cluster key for the address that the region's offer names. Reads follow, one at a time, in frames as a link's::

    reader → owner   Read
    owner → reader   Answer, and the bytes of all pieces as they are

The reader names no region before the owner has proved the key. To the owner a connection is a stranger's until it
has proved the key and named a region that is there: names have 122 random bits, and only control calls tell them.
A stranger has little time, and gives way to others.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
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

#: Of one call. A longer list of pieces goes in several calls.
MAX_PIECES = 4096
#: Limit of a call's frame, and of the frame before an answer's bytes.
MAX_FRAME_BYTES = 1 << 17
#: Connections at once; for one more a stranger gives way, or else the one that is idle for longest.
MAX_CONNECTIONS = 256
#: How long a connection may take to name its first region.
STRANGER_S = 5.0
_ACCEPT_RETRY_S = 0.05

_Bytes = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")


class Read(msgspec.Struct, array_like=True, frozen=True):
    """A call: (offset, nbytes) of each piece of a region."""

    region: Annotated[str, msgspec.Meta(max_length=256)]
    pieces: Annotated[list[tuple[_Bytes, _Bytes]], msgspec.Meta(max_length=MAX_PIECES)]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of an answer: the bytes follow, or nothing where it says why not."""

    refusal: str = ""


_READ, _ANSWER = msgspec.msgpack.Decoder(Read), msgspec.msgpack.Decoder(Answer)


def data_endpoint(host: str, port: int) -> Endpoint:
    """Return the endpoint that a connection's proofs name: the data port's address as its regions name it."""
    return Endpoint("data", f"{host}:{port}")


class TcpPeers:
    """Reads regions of other processes over pooled connections.

    Args:
        key: the cluster's, which both ends of each connection prove; None: neither does.
    """

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
            with suppress(ConnectionError):  # it may end just now; a read can be repeated
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
        """Take a connection from the pool, from which those go that their peer has closed."""
        with self._lock:
            for address, connections in list(self._idle.items()):
                for connection in list(connections):
                    if _has_ended(connection):
                        connection.close()
                        connections.remove(connection)
                if not connections:  # restarted, it has another port
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
    """A connection to an owner.

    Attributes:
        is_stranger: whether it has named no region that is here.
        idle_since_s: time at which it came, or its last call ended; infinite in the middle of one.
    """

    connection: socket.socket
    is_stranger: bool = True
    idle_since_s: float = field(default_factory=time.monotonic)

    def end(self) -> None:
        """Have its thread end."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class TcpServer:
    """Serves this process's slabs, found by ``lookup``; a thread for each connection.

    Args:
        timeout_s: seconds for which a peer may pause in the middle of an answer.
        port: 0 chooses one. advertise: address under which peers reach it; None: ``host``.
        key: the cluster's, which both ends of each connection prove; None: neither does.
    """

    def __init__(
        self,
        host: str,
        lookup: Callable[[str], memoryview | None],
        timeout_s: float,
        *,
        port: int = 0,
        advertise: str | None = None,
        key: str | None = None,
    ) -> None:
        self._lookup = lookup
        self._key = key
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.host: str = advertise or self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._peers: set[_Peer] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="transfer-accept", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closed = True
            for peer in self._peers:
                peer.end()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # out of file descriptors, say: that passes
                    time.sleep(_ACCEPT_RETRY_S)
                    continue
                peer = _Peer(connection)
                try:
                    if not self._make_room(peer):
                        connection.close()
                        continue
                    threading.Thread(target=self._serve, args=(peer,), name="transfer-serve", daemon=True).start()
                except RuntimeError:  # no thread to be had now: the peer comes again
                    self._drop(peer)

    def _make_room(self, peer: _Peer) -> bool:
        """Add a peer, and end another where there are too many. Return whether one could."""
        with self._lock:
            if len(self._peers) >= MAX_CONNECTIONS:
                first = min(self._peers, key=lambda one: (not one.is_stranger, one.idle_since_s))
                if first.idle_since_s == math.inf:
                    return False
                self._peers.discard(first)
                first.end()
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
            pass  # the peer went away, or is a stranger
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
        """Send what is asked for, or why not; return whether that was sent."""
        connection, slab = peer.connection, self._lookup(call.region)
        connection.settimeout(self._timeout_s)  # else blocks would be kept for ever for a host that left
        refusal = ""
        if slab is None:
            refusal = f"region {call.region} is not here"
        elif any(offset + nbytes > slab.nbytes for offset, nbytes in call.pieces):
            refusal = f"a piece lies outside region {call.region}"
        elif sum(nbytes for _, nbytes in call.pieces) > slab.nbytes:
            refusal = f"the pieces are more than region {call.region} has"
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
    """Raise LinkClosed, or another OSError, unless the other end opens as a link does."""
    if _receive_bytes(connection, len(OPENING), until_s) != OPENING:
        raise LinkClosed(f"it does not speak {PROTOCOL}")


def _receive(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[T], max_bytes: int, until_s: float = math.inf
) -> T:
    """Return the message of a frame, which comes in time. Raises LinkClosed and other OSErrors."""
    num_bytes: int = LENGTH.unpack(_receive_bytes(connection, LENGTH.size, until_s))[0]
    if num_bytes > max_bytes:
        raise LinkClosed(f"a message of {num_bytes} bytes; {max_bytes} are the limit")
    try:
        return decoder.decode(_receive_bytes(connection, num_bytes, until_s))
    except msgspec.DecodeError as error:
        raise LinkClosed(f"no message of {PROTOCOL}: {error}") from error


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
            raise LinkClosed("it left in the middle of a message")
        filled += count


def _has_ended(idle: socket.socket) -> bool:
    """Return whether the peer has closed an idle connection: anything to read there can only be its end."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))
