"""The framed link: typed messages over a socket.

A message is ``u32 length | MessagePack``, little-endian. Both ends run the same program; an end that receives
something else takes the other end for gone. Two processes of one machine have a :class:`Link` or
:class:`AsyncLink`; a gateway's worker and an instance have :mod:`epd_serve.rpc.streams`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

#: A message may be as long as this where nothing else is said.
MAX_BYTES = 1 << 26
_LENGTH = struct.Struct("<I")
#: Received at once by a blocking end: nearly all messages come whole.
_PIECE_BYTES = 1 << 16
#: The same for one that is long: the kernel gives a part of it at a time.
_MOST_BYTES = 1 << 22
_ENCODER = msgspec.msgpack.Encoder()

T = TypeVar("T")


class LinkClosed(ConnectionError):
    """The other end is gone, or sent what is no message."""


class NoMessage(LinkClosed):
    """The other end sent what is no message here: it is another program, or another version of this one."""


def pack(message: Any, max_bytes: int = MAX_BYTES) -> bytearray:
    """A message as it travels. Raises ValueError for one that is too long."""
    packed = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, packed, _LENGTH.size)
    nbytes = len(packed) - _LENGTH.size
    if nbytes > max_bytes:
        raise ValueError(f"a message of {nbytes} bytes; {max_bytes} are the limit of its link")
    _LENGTH.pack_into(packed, 0, nbytes)
    return packed


class Messages(Generic[T]):
    """Takes bytes as they come, gives whole messages.

    Attributes:
        missing_bytes: that the message lacks whose beginning has come; 0 where its length is not known.
    """

    __slots__ = ("_decoder", "_held", "_max_bytes", "missing_bytes")

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int = MAX_BYTES) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._held = bytearray()
        self.missing_bytes = 0

    def take(self, piece: bytes) -> list[T]:
        """The messages that are whole with a piece. Raises LinkClosed for what is none."""
        held = self._held
        data: bytes | bytearray = piece
        if held:
            held += piece
            data = held
        found, start, most = [], 0, self._max_bytes
        self.missing_bytes = 0
        with memoryview(data) as view:
            while len(data) >= start + _LENGTH.size:
                nbytes: int = _LENGTH.unpack_from(data, start)[0]
                if nbytes > most:
                    raise NoMessage(f"a message of {nbytes} bytes was announced; {most} are the limit of its link")
                end = start + _LENGTH.size + nbytes
                if end > len(data):
                    self.missing_bytes = end - len(data)
                    break
                with view[start + _LENGTH.size : end] as body:
                    try:
                        found.append(self._decoder.decode(body))
                    except msgspec.DecodeError as error:
                        raise NoMessage(f"what came is no message: {error}") from error
                start = end
        if held:
            del held[:start]
        elif start < len(piece):
            held += piece[start:]
        return found


class Link(Generic[T]):
    """A blocking end. Sending is safe from any thread; one thread receives.

    Args:
        end: a connected stream socket, which is the link's from here on.
        decoder: of the messages that come.
    """

    def __init__(
        self,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[T],
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._socket = end
        self._messages = Messages(decoder, max_bytes)
        self._max_bytes = max_bytes
        self._sending = threading.Lock()
        self._came: deque[T] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def detach(self) -> int:
        """Give the descriptor up, without a word to the other end: in a fork it is another's."""
        return self._socket.detach()

    def send(self, message: Any) -> None:
        """Send a message. Raises LinkClosed."""
        packed = pack(message, self._max_bytes)
        with self._sending:
            try:
                self._socket.sendall(packed)
            except OSError as error:
                raise LinkClosed(str(error)) from error

    def receive(self) -> T:
        """The next message, as soon as it is there. Raises LinkClosed."""
        while not self._came:
            self._came += self.read()
        return self._came.popleft()

    def read(self) -> list[T]:
        """The messages that are whole with what came; blocks until something comes. Raises LinkClosed.

        For an end that waits for several files at once; it never calls :meth:`receive`.
        """
        try:
            piece = self._socket.recv(min(max(self._messages.missing_bytes, _PIECE_BYTES), _MOST_BYTES))
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not piece:
            raise LinkClosed("the other end is closed")
        return self._messages.take(piece)

    def close(self) -> None:
        """Close the socket; the other end learns of it, and so does a thread that receives here."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class AsyncLink(Generic[T]):
    """An end on an event loop; one task receives."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[T],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._messages = Messages(decoder, max_bytes)
        self._max_bytes = max_bytes
        self._came: deque[T] = deque()

    @classmethod
    async def over(cls, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> AsyncLink[T]:
        """The link over a connected stream socket, which it takes over."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: Any) -> None:
        """Send a message without waiting; nothing happens where the other end is gone."""
        packed = pack(message, self._max_bytes)
        if not self._writer.is_closing():
            self._writer.write(packed)

    async def receive(self) -> T:
        """The next message, as soon as it is there. Raises LinkClosed."""
        while not self._came:
            try:
                piece = await self._reader.read(_PIECE_BYTES)
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not piece:
                raise LinkClosed("the other end is closed")
            self._came += self._messages.take(piece)
        return self._came.popleft()

    def close(self) -> None:
        """Close the link once the other end has all that was sent, or is gone."""
        self._writer.close()
