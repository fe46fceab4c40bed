"""Sending and serving notices (:mod:`epd_serve.protocol.engine_notices`) with blocking sockets and threads."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from epd_serve.protocol.engine_notices import LENGTH, MAX_NBYTES, AnyNotice, Notice, pack, unpack
from epd_serve.rpc.sockets import connect_blocking, watch_accepted

logger = logging.getLogger("vllm.epd_serve")

#: Does what a notice asks; returns "" or why not. The second argument says whether the sender has left.
Handler = Callable[[AnyNotice, Callable[[], bool]], str]


class NoticeServer:
    """Answers notices, a thread for each connection."""

    def __init__(self, host: str, port: int, handle: Handler) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._handle = handle
        self._listener = socket.create_server((host, port), family=family)
        watch_accepted(self._listener)
        threading.Thread(target=self._accept, name="notices", daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="notice", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (body := _read(connection)) is not None:
                try:
                    reason = self._handle(unpack(body), lambda: _has_left(connection))
                except Exception as error:  # the sender must hear of it, whatever it was
                    logger.exception("a notice could not be handled")
                    reason = f"{type(error).__name__}: {error}"
                text = reason.encode()
                connection.sendall(LENGTH.pack(len(text)) + text)


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
    """What was asked could not be done."""


def _read(connection: socket.socket) -> bytearray | None:
    """A message without its length; None where there is no more."""
    head = _receive(connection, LENGTH.size)
    if head is None:
        return None
    (nbytes,) = LENGTH.unpack(head)
    if nbytes > MAX_NBYTES:
        raise ConnectionResetError(f"a notice of {nbytes} bytes")
    return _receive(connection, nbytes)


def _receive(connection: socket.socket, nbytes: int) -> bytearray | None:
    data = bytearray(nbytes)
    view, filled = memoryview(data), 0
    while filled < nbytes:
        count = connection.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
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
