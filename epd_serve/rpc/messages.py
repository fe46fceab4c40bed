"""The messages of a link, and their frames.

A link opens with :data:`OPENING` from both ends. Frames follow: ``u32 length | MessagePack``, little-endian. Both
ends run the same program; an end that sends anything else is taken for gone::

    caller → server   Hello, Proof                     then lists of   Call, Credit, Cancel
    server → caller   Welcome, or Error of stream 0    then lists of   Head, Data, End, Error

Each stream may have ``WINDOW_BYTES`` on their way that its reader has not taken: a slow reader stops its own
stream alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

PROTOCOL = "epd-link/1"
#: No request of HTTP begins with a zero byte.
OPENING = b"\0" + PROTOCOL.encode() + b"\n"
#: Limit of the bytes of one stream that its reader has not taken.
WINDOW_BYTES = 256 * 1024
#: A reader sends credit for so much at once: rare messages, no stalls.
CREDIT_BYTES = WINDOW_BYTES // 2
#: Limits of a frame: a greeting; a call with a whole prompt or a picture; answers, which come in pieces.
MAX_GREETING_BYTES, MAX_CALL_BYTES, MAX_ANSWER_BYTES = 1 << 14, 1 << 28, 1 << 23


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The caller's nonce and the server that it means (:mod:`epd_serve.rpc.cluster`); empty without a key."""

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
    """Base of all messages behind the greeting; ``stream`` is the caller's number of a call, never used twice."""

    stream: int


class Call(Message, frozen=True, tag=0):
    """A request."""

    path: str
    body: memoryview


class Credit(Message, frozen=True, tag=1):
    """The reader has taken so much of a stream; as much more may come."""

    num_bytes: int


class Cancel(Message, frozen=True, tag=2):
    """The caller does not want the rest of an answer."""


class Head(Message, frozen=True, tag=0):
    """The beginning of an answer: its headers, names in lower case."""

    headers: list[tuple[bytes, bytes]]


class Data(Message, frozen=True, tag=1):
    """A piece of an answer's body."""

    data: bytes


class End(Message, frozen=True, tag=2):
    """The answer is complete."""


class Error(Message, frozen=True, tag=3):
    """The answer failed: an HTTP status and OpenAI's error object as JSON; status 0 and nothing behind a head."""

    status: int = 0
    body: bytes = b""


ToServer = Call | Credit | Cancel
ToCaller = Head | Data | End | Error
TO_SERVER = msgspec.msgpack.Decoder(list[ToServer])
TO_CALLER = msgspec.msgpack.Decoder(list[ToCaller])
HELLO, PROOF = msgspec.msgpack.Decoder(Hello), msgspec.msgpack.Decoder(Proof)
WELCOME = msgspec.msgpack.Decoder(Welcome | Error)

LENGTH = struct.Struct("<I")
#: A frame in a piece of its own is copied up to this size: that takes less time than a view.
_SMALL_BYTES = 1 << 14
_PREFIX_BYTES, _length_of = LENGTH.size, LENGTH.unpack_from
_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


class LinkClosed(ConnectionError):
    """The other end is gone, or sent what is no message here."""


def pack(message: Any, max_bytes: int = MAX_CALL_BYTES) -> bytearray:
    """Return a frame. Raises ValueError for one that is too long."""
    packed = bytearray(LENGTH.size)
    _ENCODER.encode_into(message, packed, LENGTH.size)
    _set_length(packed, len(packed) - LENGTH.size, max_bytes)
    return packed


def pack_call(stream: int, path: str, body: Sequence[bytes]) -> list[bytes | bytearray]:
    """Return the frame of a call in pieces; the body is not copied. Raises ValueError for one that is too long."""
    num_bytes = sum(map(len, body))
    head = pack([Call(stream, path, memoryview(b""))])
    head[-2:] = b"\xc6" + num_bytes.to_bytes(4)  # the empty body at its end becomes one of so many bytes
    _set_length(head, len(head) - LENGTH.size + num_bytes, MAX_CALL_BYTES)
    # asyncio of Python 3.13 keeps an empty piece for ever, and never closes
    return [head, *filter(None, body)]


def _set_length(packed: bytearray, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ValueError(f"a message of {num_bytes} bytes; {max_bytes} are the limit of its link")
    LENGTH.pack_into(packed, 0, num_bytes)


class Frames(Generic[T]):
    """Takes bytes as they come and returns the messages of whole frames."""

    __slots__ = ("_decode", "_held", "_max_bytes")

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int) -> None:
        self._decode = decoder.decode
        self._max_bytes = max_bytes
        self._held = bytearray()

    @property
    def rest(self) -> bytes:
        """The bytes behind the last whole frame."""
        return bytes(self._held)

    def take(self, piece: bytes, most: int | None = None) -> list[T]:
        """Return at most ``most`` messages that are whole with a piece. Raises LinkClosed for anything else.

        The bytes of a call's body stay in the memory into which they came.
        """
        data: bytes | bytearray = piece
        found: list[T] = []
        start, size = 0, len(piece)
        try:
            if not self._held and _PREFIX_BYTES < size == _PREFIX_BYTES + _length_of(piece)[0] <= _SMALL_BYTES:
                return [self._decode(piece[_PREFIX_BYTES:])]  # as most pieces are
            if self._held:
                self._held += piece
                data, size = self._held, len(self._held)
            while size >= start + _PREFIX_BYTES and most != len(found):
                num_bytes: int = _length_of(data, start)[0]
                if num_bytes > (limit := self._max_bytes):
                    raise LinkClosed(f"a message of {num_bytes} bytes; {limit} are the limit of its link")
                end = start + _PREFIX_BYTES + num_bytes
                if end > size:
                    break
                found.append(self._decode(memoryview(data)[start + _PREFIX_BYTES : end]))
                start = end
        except msgspec.DecodeError as error:
            raise LinkClosed(f"no message of {PROTOCOL}: {error}") from error
        if start or data is piece:
            self._held = bytearray(memoryview(data)[start:])
        return found
