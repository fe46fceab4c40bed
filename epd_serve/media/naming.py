"""The name of a media item's feature."""

from __future__ import annotations

import struct

from blake3 import blake3


def mm_hash(data: bytes, modality: str, fingerprint: str) -> str:
    """Name of a media item's feature: 64 hex digits of blake3.

    Over the media bytes, the modality and the model's ``media_fingerprint``; each field is preceded by its
    length, so that no two different triples give the same input.
    """
    hasher = blake3(b"epd-serve media 1")
    for field in (modality.encode(), fingerprint.encode(), data):
        hasher.update(struct.pack("<Q", len(field)))
        hasher.update(field)
    return hasher.hexdigest()
