"""The size of a plain JPEG or PNG from its first bytes, without opening the file.

Only files about which nothing is left to find out are answered: no EXIF or XMP, which may turn the picture, no
unusual coding, no damage in what is read, few scans and chunks. All others are Pillow's
(:func:`epd_serve.media.picture.pixel_size`), which gives the same sizes for those that are answered here.
"""

from __future__ import annotations

import zlib
from itertools import islice

from epd_serve.media.structure import MARKER

#: What is looked at of a file, and what mostly is enough.
HEADER_BYTES = 64 * 1024
_SHORT_BYTES = 4 * 1024

_PNG = b"\x89PNG\r\n\x1a\n"
#: Chunks before the pixels that say nothing of size or orientation.
_PLAIN_CHUNKS = frozenset({b"sRGB", b"gAMA", b"pHYs", b"cHRM", b"sBIT", b"bKGD", b"tIME"})
#: (bit depth, colour type)
_PNG_KINDS = frozenset({(8, 0), (8, 2), (8, 4), (8, 6), (1, 0), (2, 0), (4, 0)})
_JPEG = b"\xff\xd8\xff"
_JFIF, _COMMENT, _DQT, _DHT, _DRI, _SOS = 0xE0, 0xFE, 0xDB, 0xC4, 0xDD, 0xDA
#: Baseline, extended sequential and progressive frames, all of Huffman codes.
_PROGRESSIVE = 0xC2
_FRAMES = frozenset({0xC0, 0xC1, _PROGRESSIVE})


#: Markers of a progressive JPEG, chunks of a PNG: more are counted where there is time
#: (:mod:`epd_serve.media.structure`).
_FEW_MARKERS = 64
_FEW_CHUNKS = 256


def plain_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels, or None where Pillow should look."""
    if data[:3] == _JPEG:
        found = _jpeg_size(data[:_SHORT_BYTES]) or _jpeg_size(data[:HEADER_BYTES])
        if found is None:
            return None
        size, is_one_scan = found
        return size if is_one_scan or _has_few_markers(data) else None
    if data[:8] == _PNG and _has_few_chunks(data):
        return _png_size(data[:_SHORT_BYTES]) or _png_size(data[:HEADER_BYTES])
    return None


def _has_few_markers(data: bytes) -> bool:
    return sum(1 for _ in islice(MARKER.finditer(data), _FEW_MARKERS + 1)) <= _FEW_MARKERS


def _has_few_chunks(data: bytes) -> bool:
    position, num_chunks = 8, 0
    while position < len(data) and num_chunks <= _FEW_CHUNKS:
        position += 12 + int.from_bytes(data[position : position + 4])
        num_chunks += 1
    return num_chunks <= _FEW_CHUNKS


def _jpeg_size(head: bytes) -> tuple[tuple[int, int], bool] | None:
    """Return the size in a file whose segments up to the first scan are plain; and if that scan must be all."""
    size: tuple[int, int] | None = None
    num_components = 0
    position = 2
    while position + 4 <= len(head) and head[position] == 0xFF:
        marker = head[position + 1]
        length = int.from_bytes(head[position + 2 : position + 4])
        segment = head[position + 4 : position + 2 + length]
        if len(segment) != length - 2:
            return None
        if marker == _SOS:
            return None if size is None else (size, segment[:1] == bytes((num_components,)))
        if marker in _FRAMES:
            if size is not None or len(segment) < 6 or segment[0] != 8 or segment[5] not in (1, 3):
                return None
            if len(segment) != 6 + 3 * segment[5]:
                return None
            height, width = int.from_bytes(segment[1:3]), int.from_bytes(segment[3:5])
            if not width or not height:
                return None
            size = width, height
            num_components = 0 if marker == _PROGRESSIVE else segment[5]
        elif marker == _JFIF:
            if segment[:5] != b"JFIF\x00" or len(segment) < 14:
                return None
        elif marker == _DQT:
            if not segment or any(table >> 4 for table in segment[:: 1 + 64]) or len(segment) % 65:
                return None
        elif marker not in (_DHT, _DRI, _COMMENT):
            return None
        position += 2 + length
    return None


def _png_size(head: bytes) -> tuple[int, int] | None:
    """Return the size in a file whose chunks up to the first of pixels are all here and plain."""
    size: tuple[int, int] | None = None
    position = 8
    while position + 8 <= len(head):
        length, name = int.from_bytes(head[position : position + 4]), head[position + 4 : position + 8]
        if name == b"IDAT":
            return size
        end = position + 12 + length
        if end > len(head) or zlib.crc32(head[position + 4 : end - 4]) != int.from_bytes(head[end - 4 : end]):
            return None
        if size is None:
            header = head[position + 8 : end - 4]
            if name != b"IHDR" or length != 13 or (header[8], header[9]) not in _PNG_KINDS or any(header[10:13]):
                return None
            width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
            if not width or not height or (width | height) >> 31:
                return None
            size = width, height
        elif name not in _PLAIN_CHUNKS:
            return None
        position = end
    return None
