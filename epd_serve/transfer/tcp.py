"""One-sided reads and writes over TCP, for peers on different hosts.

A call is one request and one answer on a pooled connection::

    request: op (1: write, 2: read), lengths of the name and of the transfers, number of pieces,
             name, transfers that a write is for, (offset, nbytes) of each piece, payload of a write
    answer:  status (0: done, 1: refused), length of the reason,
             the reason's text or the payload of a read

With a cluster key a connection opens with its proof by both ends (:mod:`epd_serve.rpc.cluster`), for the address
that the region's offer names. The caller names no region, and sends no byte of one, before the server has proved
it::

    caller: 3, nonce      server: nonce, proof      caller: proof, first call
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Sequence

from epd_serve.protocol.wire import Region
from epd_serve.rpc import sockets
from epd_serve.rpc.cluster import NONCE_BYTES, PROOF_BYTES, Greeting, NotProved
from epd_serve.transfer.transport import HostPiece, PeerGone, TransferError, check_bounds

HEADER = struct.Struct("!BHII")
PIECE = struct.Struct("!QQ")
STATUS = struct.Struct("!BI")
WRITE, READ, GREET = 1, 2, 3
SEPARATOR = ","
#: Of one call. A longer list of pieces goes in several calls.
MAX_PIECES = 4096
MAX_NAME_BYTES = 256
MAX_TRANSFERS_BYTES = 1 << 20
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


def opened_for(host: str, port: int) -> str:
    """The text to which a connection's proofs are bound: the data port's address as its regions name it."""
    return f"data {host}:{port}"


class TcpPeers:
    """Reads and writes regions of other processes over pooled connections.

    Args:
        key: the cluster's, which both ends of each connection prove; None: neither does.
    """

    def __init__(self, timeout_s: float, key: str | None = None) -> None:
        self._timeout_s = timeout_s
        self._key = key
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}

    def write(self, region: Region, pieces: Sequence[HostPiece], transfer_ids: Sequence[str]) -> None:
        self._call(region, WRITE, pieces, transfer_ids)

    def read(self, region: Region, pieces: Sequence[HostPiece]) -> None:
        self._call(region, READ, pieces)

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _call(
        self, region: Region, op: int, pieces: Sequence[HostPiece], transfer_ids: Sequence[str] = ()
    ) -> None:
        check_bounds(region, pieces)
        for start in range(0, max(1, len(pieces)), MAX_PIECES):
            self._call_once(region, op, pieces[start : start + MAX_PIECES], transfer_ids)

    def _call_once(
        self, region: Region, op: int, pieces: Sequence[HostPiece], transfer_ids: Sequence[str]
    ) -> None:
        address = (region.host, region.port)
        with self._lock:
            pooled = self._idle.get(address, [])
            connection = pooled.pop() if pooled else None
        if connection is not None and not _has_ended(connection):
            try:
                return self._exchange(connection, address, region, op, pieces, transfer_ids)
            except ConnectionError:
                pass  # a pooled connection may have gone stale; both operations can be repeated
            except OSError as error:
                connection.close()  # not so after a timeout: what was sent may arrive after the repetition
                raise PeerGone(f"transfer with {region.host}:{region.port} broke off: {error}") from error
        if connection is not None:
            connection.close()
        self._drop_dead()
        try:
            connection = sockets.connect_blocking(*address)
        except OSError as error:
            raise PeerGone(f"{region.host}:{region.port} cannot be reached: {error}") from error
        connection.settimeout(self._timeout_s)
        try:
            if self._key is not None:
                _greet(connection, address, self._key)
            return self._exchange(connection, address, region, op, pieces, transfer_ids)
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
                ended = [connection for connection in connections if _has_ended(connection)]
                for connection in ended:
                    connection.close()
                self._idle[address] = [connection for connection in connections if connection not in ended]
                if not self._idle[address]:
                    del self._idle[address]

    def _exchange(
        self,
        connection: socket.socket,
        address: tuple[str, int],
        region: Region,
        op: int,
        pieces: Sequence[HostPiece],
        transfer_ids: Sequence[str],
    ) -> None:
        name, transfers = region.name.encode(), SEPARATOR.join(transfer_ids).encode()
        table = b"".join(PIECE.pack(offset, data.nbytes) for offset, data in pieces)
        connection.sendall(HEADER.pack(op, len(name), len(transfers), len(pieces)) + name + transfers + table)
        if op == WRITE:
            for _, data in pieces:
                connection.sendall(data)
        status, reason_length = STATUS.unpack(receive_bytes(connection, STATUS.size))
        if status != 0:
            if reason_length > _MAX_REASON_BYTES:
                raise ConnectionResetError(f"a refusal of {reason_length} bytes")
            reason = receive_bytes(connection, reason_length).decode("utf-8", "replace")
            connection.close()
            raise TransferError(reason)
        if op == READ:
            for _, data in pieces:
                receive(connection, data)
        with self._lock:
            self._idle.setdefault(address, []).append(connection)


def _greet(connection: socket.socket, address: tuple[str, int], key: str) -> None:
    """Prove the key to the other end, which proves it first. Raises NotProved where it does not, and OSError."""
    greeting = Greeting(key, opened_for(*address))
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
