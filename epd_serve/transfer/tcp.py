"""One-sided reads and writes over TCP, for peers on different hosts.

A call is one request and one answer on a pooled connection::

    request: op (1: write, 2: read), lengths of the name and of the transfers, number of pieces,
             name, transfers that a write is for, (offset, nbytes) of each piece, payload of a write
    answer:  status (0: done, 1: refused), length of the reason,
             the reason's text or the payload of a read
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from epd_serve.protocol.wire import Region
from epd_serve.transfer.joined import JoinedMemory
from epd_serve.transfer.transport import Piece, TransferError, check_bounds
from epd_serve.transfer.write_gate import WriteGate

_HEADER = struct.Struct("!BHII")
_PIECE = struct.Struct("!QQ")
_STATUS = struct.Struct("!BI")
_WRITE, _READ = 1, 2
_MAX_PIECES = 1 << 20
_SEPARATOR = ","
_ACCEPT_RETRY_S = 0.05


def _receive(connection: socket.socket, into: memoryview) -> None:
    filled = 0
    while filled < into.nbytes:
        count = connection.recv_into(into[filled:])
        if count == 0:
            raise ConnectionResetError("the peer closed the connection in the middle of a message")
        filled += count


def _receive_bytes(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _receive(connection, memoryview(data))
    return data


class TcpServer:
    """Serves this process's slabs, found by ``lookup``; a thread for each connection.

    Args:
        gate: lets the writes in.
        timeout_s: how long a peer may pause in the middle of a message.
    """

    def __init__(
        self,
        host: str,
        lookup: Callable[[str], memoryview | JoinedMemory | None],
        gate: WriteGate,
        timeout_s: float,
    ) -> None:
        self._lookup = lookup
        self._gate = gate
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.host: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="transfer-accept", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_ACCEPT_RETRY_S)  # out of file descriptors, say: that passes
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # hosts that vanish are found out
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="transfer-serve", daemon=True
                ).start()
            except RuntimeError:  # no thread to be had now: the peer comes again
                with self._lock:
                    self._connections.discard(connection)
                connection.close()
                time.sleep(_ACCEPT_RETRY_S)

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                self._serve_one(connection)
        except OSError:
            pass  # the peer went away; what it was writing is covered by its reservation
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _serve_one(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        header = _receive_bytes(connection, _HEADER.size)
        connection.settimeout(self._timeout_s)  # else blocks would be kept for ever for a host that went away
        op, name_length, transfers_length, num_pieces = _HEADER.unpack(header)
        if op not in (_WRITE, _READ) or max(num_pieces, transfers_length) > _MAX_PIECES:
            raise ConnectionResetError("not a transfer request")
        name = _receive_bytes(connection, name_length).decode("utf-8", "replace")
        transfers = _receive_bytes(connection, transfers_length).decode("utf-8", "replace")
        table = _receive_bytes(connection, num_pieces * _PIECE.size)
        wanted = list(_PIECE.iter_unpack(table))
        slab = self._lookup(name)
        refusal = ""
        if slab is None:
            refusal = f"region {name} is not here"
        elif any(slab[offset : offset + nbytes].nbytes != nbytes for offset, nbytes in wanted):
            refusal = f"a piece lies outside region {name}"
        if refusal or slab is None:
            self._refuse(connection, refusal)
        elif op == _WRITE:
            with self._gate.passing(transfers.split(_SEPARATOR) if transfers else []) as may_write:
                if not may_write:
                    self._refuse(connection, "a transfer of the write has ended here")
                for offset, nbytes in wanted:
                    _receive(connection, slab[offset : offset + nbytes])
            connection.sendall(_STATUS.pack(0, 0))
        else:
            connection.sendall(_STATUS.pack(0, 0))
            for offset, nbytes in wanted:
                connection.sendall(slab[offset : offset + nbytes])

    @staticmethod
    def _refuse(connection: socket.socket, refusal: str) -> NoReturn:
        reason = refusal.encode()
        connection.sendall(_STATUS.pack(1, len(reason)) + reason)
        raise ConnectionResetError(refusal)  # a refused write's payload is still under way: start afresh


class TcpPeers:
    """Reads and writes regions of other processes over pooled connections."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}

    def write(self, region: Region, pieces: Sequence[Piece], transfer_ids: Sequence[str]) -> None:
        self._call(region, _WRITE, pieces, transfer_ids)

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        self._call(region, _READ, pieces)

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _call(self, region: Region, op: int, pieces: Sequence[Piece], transfer_ids: Sequence[str] = ()) -> None:
        check_bounds(region.name, region.nbytes, pieces)
        address = (region.host, region.port)
        with self._lock:
            pooled = self._idle.get(address, [])
            connection = pooled.pop() if pooled else None
        if connection is not None:
            try:
                return self._exchange(connection, address, region, op, pieces, transfer_ids)
            except ConnectionError:
                connection.close()  # a pooled connection may have gone stale; both operations can be repeated
            except OSError as error:
                connection.close()  # not so after a timeout: what was sent may arrive after the repetition
                raise TransferError(f"transfer with {region.host}:{region.port} broke off: {error}") from error
        self._drop_dead()
        try:
            connection = socket.create_connection(address, timeout=self._timeout_s)
        except OSError as error:
            raise TransferError(f"{region.host}:{region.port} cannot be reached: {error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._exchange(connection, address, region, op, pieces, transfer_ids)
        except OSError as error:
            connection.close()
            raise TransferError(f"transfer with {region.host}:{region.port} broke off: {error}") from error

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
        pieces: Sequence[Piece],
        transfer_ids: Sequence[str],
    ) -> None:
        name, transfers = region.name.encode(), _SEPARATOR.join(transfer_ids).encode()
        table = b"".join(_PIECE.pack(offset, data.nbytes) for offset, data in pieces)
        connection.sendall(_HEADER.pack(op, len(name), len(transfers), len(pieces)) + name + transfers + table)
        if op == _WRITE:
            for _, data in pieces:
                connection.sendall(data)
        status, reason_length = _STATUS.unpack(_receive_bytes(connection, _STATUS.size))
        if status != 0:
            reason = _receive_bytes(connection, reason_length).decode()
            connection.close()
            raise TransferError(reason)
        if op == _READ:
            for _, data in pieces:
                _receive(connection, data)
        with self._lock:
            self._idle.setdefault(address, []).append(connection)


def _has_ended(idle: socket.socket) -> bool:
    """Nothing is due on an idle connection, so what can be read is its end."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))
