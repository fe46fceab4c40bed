"""An :class:`~epd_serve.protocol.wire.EncodeRequest` in parts, so that nobody copies its media."""

from __future__ import annotations

from msgspec.structs import replace

from epd_serve.protocol.codec import encode
from epd_serve.protocol.wire import EncodeRequest

_NO_MEDIA = b"\xa5media\xc4\x00"


def encode_in_parts(request: EncodeRequest) -> list[bytes]:
    """Encode as :func:`epd_serve.protocol.codec.encode` does, in parts: the media's bytes are not copied."""
    size = len(request.media)
    if size < 1 << 8:
        return [encode(request)]
    head, found, tail = encode(replace(request, media=b"")).partition(_NO_MEDIA)
    assert found and _NO_MEDIA not in tail, "a media item has no text of its own in the message"
    length = b"\xc5" + size.to_bytes(2) if size < 1 << 16 else b"\xc6" + size.to_bytes(4)
    return [head + _NO_MEDIA[:-2] + length, request.media, tail]
