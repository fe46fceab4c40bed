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


def pack(message: Any, encoder: msgspec.msgpack.Encoder = _ENCODER, max_bytes: int = MAX_BYTES) -> bytearray:
    """A message as it travels. Raises ValueError for one that is too long."""
    packed = bytearray(_LENGTH.size)
    encoder.encode_into(message, packed, _LENGTH.size)
    nbytes = len(packed) - _LENGTH.size
    if nbytes > max_bytes:
        raise ValueError(f"a message of {nbytes} bytes; {max_bytes} are the limit of its link")
    _LENGTH.pack_into(packed, 0, nbytes)
    return packed


def _length(head: bytes | bytearray, start: int, max_bytes: int) -> int:
    nbytes: int = _LENGTH.unpack_from(head, start)[0]
    if nbytes > max_bytes:
        raise NoMessage(f"a message of {nbytes} bytes was announced; {max_bytes} are the limit of its link")
    return nbytes


def _unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise NoMessage(f"what came is no message: {error}") from error


class Messages(Generic[T]):
    """Takes bytes as they come, gives whole messages."""

    __slots__ = ("_decoder", "_held", "_max_bytes")

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int = MAX_BYTES) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._held = bytearray()

    @property
    def missing_bytes(self) -> int:
        """The bytes that the message lacks whose beginning has come; 0 where its length is not known."""
        held = self._held
        return _LENGTH.size + _length(held, 0, self._max_bytes) - len(held) if len(held) >= _LENGTH.size else 0

    def take(self, piece: bytes) -> list[T]:
        """The messages that are whole with a piece. Raises LinkClosed for what is none."""
        held = self._held
        if not held and len(piece) >= _LENGTH.size == len(piece) - _length(piece, 0, self._max_bytes):
            return [_unpack(self._decoder, memoryview(piece)[_LENGTH.size :])]
        data: bytes | bytearray = piece
        if held:
            held += piece
            data = held
        found, start = [], 0
        with memoryview(data) as view:
            while len(data) >= start + _LENGTH.size:
                end = start + _LENGTH.size + _length(data, start, self._max_bytes)
                if end > len(data):
                    break
                with view[start + _LENGTH.size : end] as body:
                    found.append(_unpack(self._decoder, body))
                start = end
        if held:
            del held[:start]
        else:
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
        encoder: msgspec.msgpack.Encoder = _ENCODER,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._socket = end
        self._messages = Messages(decoder, max_bytes)
        self._encoder = encoder
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
        self.send_packed(pack(message, self._encoder, self._max_bytes))

    def send_packed(self, packed: bytearray) -> None:
        """Send a message that is packed once for several links. Raises LinkClosed."""
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
        self._decoder = decoder
        self._max_bytes = max_bytes

    @classmethod
    async def over(cls, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> AsyncLink[T]:
        """The link over a connected stream socket, which it takes over."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: Any) -> None:
        """Send a message without waiting; nothing happens where the other end is gone."""
        packed = pack(message, max_bytes=self._max_bytes)
        if not self._writer.is_closing():
            self._writer.write(packed)

    async def receive(self) -> T:
        """The next message, as soon as it is there. Raises LinkClosed."""
        head = await self._read(_LENGTH.size)
        return _unpack(self._decoder, await self._read(_length(head, 0, self._max_bytes)))

    async def _read(self, nbytes: int) -> bytes:
        try:
            return await self._reader.readexactly(nbytes)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkClosed("the other end is closed") from error

    def close(self) -> None:
        """Close the link once the other end has all that was sent, or is gone."""
        self._writer.close()
