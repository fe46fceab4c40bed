"""Notices between vLLM instances with epd-serve's connectors and the gateway.

A notice is ``u32 length | msgpack``, little-endian; its answer ``u32 length | UTF-8``: an empty text means that
the request is done, any other gives the reason why not. An answer may take as long as the work; closing the
connection before it comes gives the work up.
"""

from __future__ import annotations

import struct

import msgspec

from epd_serve.protocol.wire import FeatureEvent

LENGTH = struct.Struct("<I")
#: The names of thousands of features, and more.
MAX_NBYTES = 1 << 20


class Notice(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all notices."""


class FeatureAnnounced(Notice, frozen=True):
    """To P: a feature is there. Answered when P has its bytes."""

    event: FeatureEvent


class FeatureWithdrawn(Notice, frozen=True):
    """To P: no instance will send this feature for this request."""

    request_id: str
    mm_hash: str


class FeatureKept(Notice, frozen=True):
    """From E's worker to its scheduler: these features are stored, those are not any more."""

    stored: list[str]
    evicted: list[str]


AnyNotice = FeatureAnnounced | FeatureWithdrawn | FeatureKept

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyNotice)


def pack(notice: Notice) -> bytes:
    """A notice as it travels."""
    body = _encoder.encode(notice)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray) -> AnyNotice:
    """Decode the body that follows a notice's length. Raises ValueError for anything else."""
    notice: AnyNotice = _decoder.decode(body)
    return notice
