"""The framed link: typed messages over a socket.

A message is ``u32 length | MessagePack``, little-endian. Both ends run the same program; an end that receives
something else takes the other end for gone.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

#: A message may be as long as this where nothing else is said.
MAX_BYTES = 1 << 26
_LENGTH = struct.Struct("<I")
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
    """Takes bytes as they come, gives whole messages."""

    __slots__ = ("_decoder", "_held", "_max_bytes")

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int = MAX_BYTES) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._held = bytearray()

    def take(self, piece: bytes) -> list[T]:
        """The messages that are whole with a piece. Raises LinkClosed for what is none."""
        held = self._held
        data: bytes | bytearray = piece
        if held:
            held += piece
            data = held
        found, start, most = [], 0, self._max_bytes
        with memoryview(data) as view:
            while len(data) >= start + _LENGTH.size:
                nbytes: int = _LENGTH.unpack_from(data, start)[0]
                if nbytes > most:
                    raise NoMessage(f"a message of {nbytes} bytes was announced; {most} are the limit of its link")
                end = start + _LENGTH.size + nbytes
                if end > len(data):
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
