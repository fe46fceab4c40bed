"""Sending and serving notices (:mod:`epd_serve.protocol.engine_notices`) with blocking sockets and threads."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from epd_serve.protocol.engine_notices import LENGTH, MAX_NBYTES, AnyNotice, Notice, pack, unpack
from epd_serve.rpc.sockets import connect_blocking, watch_accepted

logger = logging.getLogger("vllm.epd_serve")

#: Does what a notice asks; returns "" or why not. The second argument says whether the sender has left.
Handler = Callable[[AnyNotice, Callable[[], bool]], str]


#: Connections at once that have sent no whole notice yet, and those whose notice is handled.
MAX_READ, MAX_HANDLED = 256, 1024
#: How long a connection may take to send a notice, or to take its answer.
READ_S = 5.0
#: Received at once: memory is taken for what has come, not for what was announced.
_PIECE_BYTES = 1 << 16
_ACCEPT_RETRY_S = 0.05


class NoticeServer:
    """Answers notices, a thread for each connection. Anybody may connect: those that send nothing make room."""

    def __init__(self, host: str, port: int, handle: Handler) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._handle = handle
        self._listener = socket.create_server((host, port), family=family)
        watch_accepted(self._listener)
        self._lock = threading.Lock()
        self._read: dict[socket.socket, None] = {}  # the oldest first
        self._num_handled = 0
        self._is_closed = False
        threading.Thread(target=self._accept, name="notices", daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_RETRY_S)  # out of file descriptors, say: that passes
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="notice", daemon=True).start()
            except RuntimeError:  # no thread to be had now: the peer comes again
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (body := self._next(connection)) is not None:
                text = self._answer(body, connection).encode()
                connection.settimeout(READ_S)
                connection.sendall(LENGTH.pack(len(text)) + text)
        except OSError:
            pass  # it left, or made room for others
        finally:
            connection.close()

    def _next(self, connection: socket.socket) -> bytearray | None:
        with self._lock:
            if len(self._read) >= MAX_READ:
                oldest = next(iter(self._read))
                del self._read[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._read[connection] = None
        try:
            return _read(connection, time.monotonic() + READ_S)
        finally:
            with self._lock:
                self._read.pop(connection, None)

    def _answer(self, body: bytearray, connection: socket.socket) -> str:
        with self._lock:
            if self._num_handled >= MAX_HANDLED:
                return f"{MAX_HANDLED} notices are being handled; ask again later"
            self._num_handled += 1
        try:
            return self._handle(unpack(body), lambda: _has_left(connection))
        except Exception as error:  # the sender must hear of it, whatever it was
            logger.exception("a notice could not be handled")
            return f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._num_handled -= 1


class Conversation:
    """One notice and its answer; :meth:`close`, from any thread, gives it up."""

    def __init__(self, address: str) -> None:
        """``address`` is ``host:port``."""
        self._address = address
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False

    def ask(self, notice: Notice, timeout_s: float | None) -> None:
        """Returns when it is done. Raises OSError where the peer is not there, leaves or takes too long, and
        NoticeRefused where it says why not."""
        host, _, port = self._address.rpartition(":")
        connection = connect_blocking(host, int(port))
        with self._lock:
            self._connection = connection
            closed = self._closed
        with connection:
            if closed:
                raise ConnectionAbortedError("given up")
            connection.settimeout(timeout_s)
            connection.sendall(pack(notice))
            answer = _read(connection)
        if answer is None:
            raise ConnectionResetError(f"{self._address} left without an answer")
        if answer:
            raise NoticeRefused(answer.decode("utf-8", "replace"))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)


class NoticeRefused(Exception):
    """The other side could not do what it was asked."""


def _read(connection: socket.socket, deadline_s: float | None = None) -> bytearray | None:
    """A message without its length; None where there is no more. Raises OSError."""
    head = _receive(connection, LENGTH.size, deadline_s)
    if head is None:
        return None
    (nbytes,) = LENGTH.unpack(head)
    if nbytes > MAX_NBYTES:
        raise ConnectionResetError(f"a notice of {nbytes} bytes")
    return _receive(connection, nbytes, deadline_s)


def _receive(connection: socket.socket, nbytes: int, deadline_s: float | None) -> bytearray | None:
    data = bytearray()
    while len(data) < nbytes:
        if deadline_s is not None:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        piece = connection.recv(min(nbytes - len(data), _PIECE_BYTES))
        if not piece:
            return None
        data += piece
    return data


def _has_left(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLHUP)
    if not poll.poll(0):
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
