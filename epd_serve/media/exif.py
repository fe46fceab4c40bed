"""The orientation in a picture's EXIF, and nothing else of it.

A general reader keeps a copy of each entry's data, and 64 KB can hold entries that share all of it: gigabytes.
"""

from __future__ import annotations

import struct

_ORIENTATION_TAG = 0x0112
_SHORT, _LONG = 3, 4
_BYTES = {_SHORT: 2, _LONG: 4}
_ENTRY_BYTES = 12


def exif_orientation(exif: bytes) -> int | None:
    """The number in the tag of the first directory; None where there is none, or it cannot be read."""
    exif = exif.removeprefix(b"Exif\0\0")
    if exif[:4] not in (b"II*\0", b"MM\0*") or len(exif) < 10:
        return None
    order = "<" if exif[:1] == b"I" else ">"
    directory: int = struct.unpack_from(order + "I", exif, 4)[0]
    if directory + 2 > len(exif):
        return None
    count: int = struct.unpack_from(order + "H", exif, directory)[0]
    entry, value = struct.Struct(order + "HHI"), None
    for position in range(directory + 2, directory + 2 + count * _ENTRY_BYTES, _ENTRY_BYTES):
        if position + _ENTRY_BYTES > len(exif):
            break
        tag, kind, length = entry.unpack_from(exif, position)
        if tag == _ORIENTATION_TAG and kind in _BYTES and length == 1:
            value = int.from_bytes(
                exif[position + 8 : position + 8 + _BYTES[kind]], "little" if order == "<" else "big"
            )
    return value
