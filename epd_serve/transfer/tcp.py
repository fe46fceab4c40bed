"""One-sided reads over TCP, for peers on different hosts.

A call is one request and one answer on a pooled connection::

    request: op (2: read), length of the region's name, number of pieces, name, (offset, nbytes) of each piece
    answer:  status (0: done, 1: refused), length of the reason, the reason's text or the bytes

With a cluster key a connection opens with its proof by both ends (:mod:`epd_serve.rpc.cluster`), for the address
that the region's offer names. The caller names no region, and sends no byte of one, before the server has proved
it::

    caller: 3, nonce      server: nonce, proof      caller: proof, first call

To the server a connection is a stranger's until it has proved the cluster's key, if there is one, and named a
region that is there: names have 122 random bits, and only control calls tell them. A stranger gets neither a
thread nor memory for more than that name, and little time.
"""

from __future__ import annotations

import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from epd_serve.protocol.wire import Region
from epd_serve.rpc import sockets
from epd_serve.rpc.cluster import NONCE_BYTES, PROOF_BYTES, Endpoint, Greeting, NotProved, ServerProof
from epd_serve.transfer.transport import HostPiece, PeerGone, TransferError, check_bounds

HEADER = struct.Struct("!BHI")
PIECE = struct.Struct("!QQ")
STATUS = struct.Struct("!BI")
READ, GREET = 2, 3
#: Of one call. A longer list of pieces goes in several calls.
MAX_PIECES = 4096
MAX_NAME_BYTES = 256
_MAX_REASON_BYTES = 4096
_RECEIVE_BYTES = 1 << 16


def receive(connection: socket.socket, into: memoryview) -> None:
    filled = 0
    while filled < into.nbytes:
        count = connection.recv_into(into[filled:])
        if count == 0:
            raise ConnectionResetError("the peer closed the connection in the middle of a message")
        filled += count


def receive_bytes(connection: socket.socket, count: int) -> bytearray:
    """Exactly ``count`` bytes; memory grows with what has come, not with what was announced."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), _RECEIVE_BYTES))
        if not piece:
            raise ConnectionResetError("the peer closed the connection in the middle of a message")
        data += piece
    return data


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
        for start in range(0, max(1, len(pieces)), MAX_PIECES):
            self._read_once(region, pieces[start : start + MAX_PIECES])

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _read_once(self, region: Region, pieces: Sequence[HostPiece]) -> None:
        with self._lock:
            pooled = self._idle.get((region.host, region.port), [])
            connection = pooled.pop() if pooled else None
        if connection is not None and not _has_ended(connection):
            try:
                return self._exchange(connection, region, pieces)
            except ConnectionError:
                pass  # a pooled connection may have gone stale; a read can be repeated
            except OSError as error:
                connection.close()
                raise PeerGone(f"transfer with {region.host}:{region.port} broke off: {error}") from error
        if connection is not None:
            connection.close()
        self._drop_dead()
        try:
            connection = sockets.connect_blocking(region.host, region.port)
        except OSError as error:
            raise PeerGone(f"{region.host}:{region.port} cannot be reached: {error}") from error
        connection.settimeout(self._timeout_s)
        try:
            if self._key is not None:
                _greet(connection, data_endpoint(region.host, region.port), self._key)
            return self._exchange(connection, region, pieces)
        except OSError as error:
            connection.close()
            raise PeerGone(f"transfer with {region.host}:{region.port} broke off: {error}") from error
        except NotProved as error:
            connection.close()
            raise PeerGone(
                f"{region.host}:{region.port} does not prove that it has this deployment's cluster_key"
            ) from error

    def _drop_dead(self) -> None:
        """Close idle connections that their peer has closed: restarted, it has another port and none is reused."""
        with self._lock:
            for address, connections in list(self._idle.items()):
                for connection in list(connections):
                    if _has_ended(connection):
                        connection.close()
                        connections.remove(connection)
                if not connections:
                    del self._idle[address]

    def _exchange(self, connection: socket.socket, region: Region, pieces: Sequence[HostPiece]) -> None:
        name = region.name.encode()
        table = b"".join(PIECE.pack(offset, data.nbytes) for offset, data in pieces)
        connection.sendall(HEADER.pack(READ, len(name), len(pieces)) + name + table)
        status, reason_length = STATUS.unpack(receive_bytes(connection, STATUS.size))
        if status != 0:
            if reason_length > _MAX_REASON_BYTES:
                raise ConnectionResetError(f"a refusal of {reason_length} bytes")
            reason = receive_bytes(connection, reason_length).decode("utf-8", "replace")
            connection.close()
            raise TransferError(reason)
        for _, data in pieces:
            receive(connection, data)
        with self._lock:
            self._idle.setdefault((region.host, region.port), []).append(connection)


def _greet(connection: socket.socket, reached: Endpoint, key: str) -> None:
    """Prove the key to the other end, which proves it first. Raises NotProved where it does not, and OSError."""
    greeting = Greeting(key, reached)
    connection.sendall(bytes([GREET]) + greeting.nonce.encode())
    try:
        answer = receive_bytes(connection, NONCE_BYTES + PROOF_BYTES)
    except ConnectionError as error:  # so does a server without a key, to which this is no call
        raise NotProved from error
    proof = greeting.prove(bytes(answer[:NONCE_BYTES]), bytes(answer[NONCE_BYTES:]))
    connection.sendall(proof.encode())


def _has_ended(idle: socket.socket) -> bool:
    """Whether the peer has closed an idle connection: anything to read there can only be its end."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))


#: Connections at once that have named a region, and that have not; together the most that a server has.
MAX_KNOWN, MAX_STRANGERS = 224, 32
#: How long a connection may take to name its first region.
STRANGER_S = 5.0
_ACCEPT_RETRY_S = 0.05


class _Stranger:
    """A connection that has not named a region yet, and what it has sent: a header and a name at most.

    Args:
        key: that it has to prove before, for a connection to ``own``; None: none.
    """

    __slots__ = ("_key", "_own", "_proof", "connection", "data", "until_s")

    def __init__(self, connection: socket.socket, key: str | None, own: Endpoint) -> None:
        self.connection = connection
        self.data = bytearray()
        self.until_s = time.monotonic() + STRANGER_S
        self._key = key
        self._own = own
        self._proof: ServerProof | None = None  # sent; the peer's own is awaited

    def read(self) -> bool:
        """Whether the name is complete. Raises OSError for a peer that left, or sends something else."""
        if self._key is not None and not self._greeted(self._key):
            return False
        if not self._fill(HEADER.size):
            return False
        return self._fill(HEADER.size + _name_length(self.data))

    def _greeted(self, key: str) -> bool:
        """Whether it has proved the key. Raises OSError where it says anything else."""
        hello_bytes = 1 + NONCE_BYTES
        if not self._fill(1):
            return False
        if self.data[0] != GREET:
            refusal = "connections to this instance open with the proof of its deployment's cluster_key"
            _send_refusal(self.connection, refusal)
            raise ConnectionRefusedError(refusal)
        if len(self.data) < hello_bytes:
            if not self._fill(hello_bytes):
                return False
            self._proof = ServerProof(key, self._own, self.data[1:].decode("latin-1"))
            self.connection.sendall((self._proof.nonce + self._proof.proof).encode())
        if not self._fill(hello_bytes + PROOF_BYTES):
            return False
        assert self._proof is not None
        if not self._proof.check(bytes(self.data[hello_bytes:])):
            raise ConnectionRefusedError("this is no proof of the cluster_key")
        self.data.clear()
        self._key = None
        return True

    def _fill(self, num_bytes: int) -> bool:
        """Whether so much is there."""
        while (count := num_bytes - len(self.data)) > 0:
            try:
                piece = self.connection.recv(count)
            except BlockingIOError:
                return False
            if not piece:
                raise ConnectionResetError("it left")
            self.data += piece
        return True


@dataclass(eq=False, slots=True)
class _Known:
    """A connection that has named a region of this server.

    Attributes:
        idle_since_s: time at which its last call ended; None in the middle of one.
    """

    connection: socket.socket
    idle_since_s: float | None = None


class TcpServer:
    """Serves this process's slabs, found by ``lookup``; a thread for each connection that has named one.

    Args:
        timeout_s: seconds for which a peer may pause in the middle of a message.
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
        self._listener.setblocking(False)
        self.host: str = advertise or self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._known: set[_Known] = set()
        self._lock = threading.Lock()  # of _known and _closed; the strangers are one thread's
        self._closed = False
        self._waker, self._woken = socket.socketpair()
        selector = selectors.DefaultSelector()  # a descriptor, which the thread might not get later
        threading.Thread(
            target=self._receive_strangers, args=(selector,), name="transfer-accept", daemon=True
        ).start()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            known = list(self._known)
        self._waker.close()
        for one in known:
            _shut_down(one.connection)

    # ------------------------------------------------------------------ strangers

    def _receive_strangers(self, selector: selectors.BaseSelector) -> None:
        with selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                oldest = next(iter(self._strangers.values()), None)
                wait_s = None if oldest is None else max(0.0, oldest.until_s - time.monotonic())
                for key, _ in selector.select(wait_s):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.data is not None and key.fileobj in self._strangers:
                        self._hear(selector, key.data)
                now = time.monotonic()
                for stranger in [one for one in self._strangers.values() if one.until_s <= now]:
                    self._turn_away(selector, stranger)
            for stranger in self._strangers.values():
                stranger.connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_ACCEPT_RETRY_S)  # out of file descriptors, say: that passes
            return
        connection.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(selector, next(iter(self._strangers.values())))
        own = data_endpoint(self.host, self.port)
        stranger = self._strangers[connection] = _Stranger(connection, self._key, own)
        selector.register(connection, selectors.EVENT_READ, stranger)
        self._hear(selector, stranger)  # who means well has sent it by now

    def _hear(self, selector: selectors.BaseSelector, stranger: _Stranger) -> None:
        try:
            if not stranger.read():
                return
            name = bytes(stranger.data[HEADER.size :]).decode("utf-8", "replace")
            if self._lookup(name) is None:
                _send_refusal(stranger.connection, f"region {name} is not here")
                raise ConnectionRefusedError(name)
        except OSError:
            self._turn_away(selector, stranger)
            return
        selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        self._begin(stranger)

    def _turn_away(self, selector: selectors.BaseSelector, stranger: _Stranger) -> None:
        selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        stranger.connection.close()

    # ------------------------------------------------------------------ those that have named a region

    def _begin(self, stranger: _Stranger) -> None:
        known = _Known(stranger.connection)
        with self._lock:
            if self._closed or not self._has_room():
                known.connection.close()
                return
            self._known.add(known)
        try:
            known.connection.setblocking(True)
            sockets.watch(known.connection)
            known.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = (known, bytes(stranger.data))
            threading.Thread(target=self._serve, args=arguments, name="transfer-serve", daemon=True).start()
        except (OSError, RuntimeError):  # no thread to be had now: the peer comes again
            self._end(known)

    def _has_room(self) -> bool:
        """Whether there is room for one more connection.

        The one idle for longest gives way, and its peer makes another.
        """
        if len(self._known) < MAX_KNOWN:
            return True
        idle = [(one.idle_since_s, id(one), one) for one in self._known if one.idle_since_s is not None]
        if not idle:
            return False
        _, _, longest = min(idle)
        self._known.discard(longest)
        _shut_down(longest.connection)
        return True

    def _end(self, known: _Known) -> None:
        with self._lock:
            self._known.discard(known)
        known.connection.close()

    def _serve(self, known: _Known, begun: bytes) -> None:
        connection = known.connection
        try:
            connection.settimeout(self._timeout_s)
            self._serve_one(connection, begun[: HEADER.size], begun[HEADER.size :])
            while True:
                known.idle_since_s = time.monotonic()
                connection.settimeout(None)
                header = receive_bytes(connection, HEADER.size)
                known.idle_since_s = None
                connection.settimeout(self._timeout_s)  # else blocks would be kept for ever for a host that left
                self._serve_one(connection, header, receive_bytes(connection, _name_length(header)))
        except OSError:
            pass  # the peer went away
        finally:
            self._end(known)

    def _serve_one(self, connection: socket.socket, header: bytes | bytearray, named: bytes | bytearray) -> None:
        op, _, num_pieces = HEADER.unpack(header)
        if op != READ or num_pieces > MAX_PIECES:
            raise ConnectionResetError("not a transfer request")
        name = named.decode("utf-8", "replace")
        slab = self._lookup(name)
        if slab is None:
            _refuse(connection, f"region {name} is not here")
        wanted = list(PIECE.iter_unpack(receive_bytes(connection, num_pieces * PIECE.size)))
        if any(slab[offset : offset + nbytes].nbytes != nbytes for offset, nbytes in wanted):
            _refuse(connection, f"a piece lies outside region {name}")
        if sum(nbytes for _, nbytes in wanted) > slab.nbytes:
            _refuse(connection, f"the pieces are more than region {name} has")
        connection.sendall(STATUS.pack(0, 0))
        for offset, nbytes in wanted:
            connection.sendall(slab[offset : offset + nbytes])


def _name_length(header: bytes | bytearray) -> int:
    """The length of the name in a header. Raises ConnectionResetError for a length that no region's name has."""
    length: int = HEADER.unpack_from(header)[1]
    if not 0 < length <= MAX_NAME_BYTES:
        raise ConnectionResetError("not a transfer request")
    return length


def _refuse(connection: socket.socket, refusal: str) -> NoReturn:
    _send_refusal(connection, refusal)
    raise ConnectionResetError(refusal)


def _send_refusal(connection: socket.socket, refusal: str) -> None:
    reason = refusal.encode()
    connection.sendall(STATUS.pack(1, len(reason)) + reason)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
