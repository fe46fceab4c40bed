"""The messages of a link, and their frames.

Both ends open a link with :data:`OPENING`. Frames follow: ``u32 length | MessagePack``, little-endian. Both ends
run the same program; any other input closes the link::

    caller → server   Hello, Proof                     then lists of   Call, Credit, Cancel
    server → caller   Welcome, or Error of stream 0    then lists of   Head, Data, End, Error

The sender of a stream may be ``WINDOW_BYTES`` ahead of its reader, so a slow reader stops only its own stream.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

PROTOCOL = "epd-link/1"
#: Begins with a zero byte, which no HTTP request does.
OPENING = b"\0" + PROTOCOL.encode() + b"\n"
#: Bytes of one stream that its reader has not read yet.
WINDOW_BYTES = 256 * 1024
#: Send credit every CREDIT_BYTES: rare messages, no stalls.
CREDIT_BYTES = WINDOW_BYTES // 2
#: Frame limits: a greeting; a call with a whole prompt or picture; a piece of an answer.
MAX_GREETING_BYTES, MAX_CALL_BYTES, MAX_ANSWER_BYTES = 1 << 14, 1 << 28, 1 << 23


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The caller's nonce and intended server (:mod:`epd_serve.rpc.cluster`); empty without a key."""

    nonce: str
    reached: str


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The server's nonce and proof of the cluster key; empty without a key."""

    nonce: str
    proof: str


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """The caller's proof of the cluster key; empty without a key."""

    proof: str


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages after the greeting; ``stream`` is the caller's number of a call, never reused."""

    stream: int


class Call(Message, frozen=True, tag=0):
    path: str
    body: memoryview


class Credit(Message, frozen=True, tag=1):
    """The reader has read ``num_bytes``; the server may send as many more."""

    num_bytes: int


class Cancel(Message, frozen=True, tag=2):
    """The caller drops the rest of the answer."""


class Head(Message, frozen=True, tag=0):
    """The answer begins, with these headers (names in lower case)."""

    headers: list[tuple[bytes, bytes]]


class Data(Message, frozen=True, tag=1):
    """A piece of an answer's body."""

    data: bytes


class End(Message, frozen=True, tag=2):
    """The answer is complete."""


class Error(Message, frozen=True, tag=3):
    """The answer failed with an HTTP status and OpenAI's error object as JSON; status 0 after a head."""

    status: int = 0
    body: bytes = b""


ToServer = Call | Credit | Cancel
ToCaller = Head | Data | End | Error
TO_SERVER = msgspec.msgpack.Decoder(list[ToServer])
TO_CALLER = msgspec.msgpack.Decoder(list[ToCaller])
HELLO, PROOF = msgspec.msgpack.Decoder(Hello), msgspec.msgpack.Decoder(Proof)
WELCOME = msgspec.msgpack.Decoder(Welcome | Error)

LENGTH = struct.Struct("<I")
#: Up to this size, copying a frame that arrives alone is faster than a view.
_SMALL_BYTES = 1 << 14
_PREFIX_BYTES, _length_of = LENGTH.size, LENGTH.unpack_from
_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


class LinkClosed(ConnectionError):
    """The other end closed the connection or sent an invalid message."""


def pack(message: Any, max_bytes: int = MAX_CALL_BYTES) -> bytearray:
    """Return the frame of a message. Raises ValueError if it is too long."""
    packed = bytearray(LENGTH.size)
    _ENCODER.encode_into(message, packed, LENGTH.size)
    _set_length(packed, len(packed) - LENGTH.size, max_bytes)
    return packed


def pack_call(stream: int, path: str, body: Sequence[bytes]) -> list[bytes | bytearray]:
    """Return the frame of a call in pieces, without copying the body. Raises ValueError if it is too long."""
    num_bytes = sum(map(len, body))
    head = pack([Call(stream, path, memoryview(b""))])
    head[-2:] = b"\xc6" + num_bytes.to_bytes(4)  # replaces the empty body's header
    _set_length(head, len(head) - LENGTH.size + num_bytes, MAX_CALL_BYTES)
    # Python 3.13's asyncio keeps an empty piece forever and never closes
    return [head, *filter(None, body)]


def _set_length(packed: bytearray, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ValueError(f"a message of {num_bytes} bytes exceeds the limit of {max_bytes}")
    LENGTH.pack_into(packed, 0, num_bytes)


class Frames(Generic[T]):
    """Splits received bytes into frames and decodes their messages."""

    __slots__ = ("_decode", "_held", "_max_bytes")

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int) -> None:
        self._decode = decoder.decode
        self._max_bytes = max_bytes
        self._held = bytearray()

    @property
    def rest(self) -> bytes:
        """The bytes after the last whole frame."""
        return bytes(self._held)

    def take(self, piece: bytes, most: int | None = None) -> list[T]:
        """Add a piece and return the completed messages, at most ``most``. Raises LinkClosed.

        The body of a call is a view of the received memory.
        """
        data: bytes | bytearray = piece
        found: list[T] = []
        start, size = 0, len(piece)
        try:
            if not self._held and _PREFIX_BYTES < size == _PREFIX_BYTES + _length_of(piece)[0] <= _SMALL_BYTES:
                return [self._decode(piece[_PREFIX_BYTES:])]  # the usual case
            if self._held:
                self._held += piece
                data, size = self._held, len(self._held)
            while size >= start + _PREFIX_BYTES and most != len(found):
                num_bytes: int = _length_of(data, start)[0]
                if num_bytes > (limit := self._max_bytes):
                    raise LinkClosed(f"a message of {num_bytes} bytes exceeds the limit of {limit}")
                end = start + _PREFIX_BYTES + num_bytes
                if end > size:
                    break
                found.append(self._decode(memoryview(data)[start + _PREFIX_BYTES : end]))
                start = end
        except ValueError as error:  # also invalid UTF-8
            raise LinkClosed(f"invalid {PROTOCOL} message: {error}") from error
        if start or data is piece:
            self._held = bytearray(memoryview(data)[start:])
        return found
