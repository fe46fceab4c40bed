"""Notices between vLLM instances with epd-serve's connectors and the gateway.

A notice is ``u32 length | msgpack``, little-endian; its answer ``u32 length | UTF-8``: an empty text means that
the request is done, any other gives the reason why not. An answer may take as long as the work; closing the
connection before it comes gives the work up.
"""

from __future__ import annotations

import struct

import msgspec

from epd_serve.protocol.wire import FeatureEvent, Region

LENGTH = struct.Struct("<I")
#: Ends the name of a picture that is given with its pixels where P or D otherwise get none: vLLM's caches go by
#: names.
WITH_PIXELS = ":pixels"
#: The block ids of three million tokens, and more.
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


class KVWanted(Notice, frozen=True):
    """To P: write the KV of a prompt's blocks from ``first_block`` on to D's ``block_ids``.

    Answered when all is written.

    Attributes:
        prompt: checksum of the prompt that D will compute, which must be the one that P has computed.
        region: D's memory: that of each layer after the one before, all of one size.
        num_layers: layers in the region.
        planes: number of equal parts of a layer's memory that each hold a part of every block (keys, values).
        block_bytes: bytes of one block in one plane.
    """

    transfer_id: str
    prompt: str
    first_block: int
    block_ids: list[int]
    region: Region
    num_layers: int
    planes: int
    block_bytes: int


class KVUnwanted(Notice, frozen=True):
    """To P: D has given the request up before it asked for its KV."""

    transfer_id: str


AnyNotice = FeatureAnnounced | FeatureWithdrawn | FeatureKept | KVWanted | KVUnwanted

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
