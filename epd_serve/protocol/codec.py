"""The encoding of messages between the parts of a deployment: msgpack, and JSON where people read along."""

from __future__ import annotations

from typing import TypeVar

import msgspec


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all wire messages."""


M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Message → msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview, message_type: type[M]) -> M:
    """msgpack → message. Raises ``ValueError`` (msgspec.ValidationError) that names the wrong field."""
    return msgspec.msgpack.decode(data, type=message_type)


def to_json(message: Message) -> bytes:
    return msgspec.json.encode(message)


def from_json(data: bytes, message_type: type[M]) -> M:
    return msgspec.json.decode(data, type=message_type)
