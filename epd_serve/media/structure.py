"""The parts of a picture's file, counted before a decoder sees them.

A decoder spends time on each scan, chunk and block, however little it says: a few megabytes can keep it busy for
an hour. The walk itself ends at the first part too many, so it costs milliseconds at most.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from epd_serve.errors import InvalidRequest

#: Scans of a JPEG. Encoders write 10 for a progressive picture, and hardly ever more than 20.
MAX_SCANS = 100
#: Marker segments of a JPEG: the longest colour profile takes 255, depth maps about as many.
MAX_SEGMENTS = 1024
#: Those of EXIF, which the standard has once.
MAX_EXIF_SEGMENTS = 16
#: Bytes between two segments, where nothing belongs but a little padding.
MAX_PADDING = 1024
#: Chunks of a PNG or WebP that hold pixels: 32 MB in pieces of 2 KB.
MAX_PIXEL_CHUNKS = 16_384
#: Chunks of a PNG or WebP that hold anything else.
MAX_OTHER_CHUNKS = 1024
#: Those of them that a reader inflates, to a megabyte each.
MAX_DEFLATED_CHUNKS = 64
#: Pieces of at most 255 bytes that stand before the first frame of a GIF: a megabyte of comments.
MAX_BLOCKS = 4096

#: The next marker of a JPEG: no stuffed byte, no restart, no fill.
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_START, _END, _SCAN, _TEMPORARY = 0xD8, 0xD9, 0xDA, 0x01
_PNG_CHUNK = struct.Struct(">I4s")
_WEBP_CHUNK = struct.Struct("<4sI")
_DEFLATED = frozenset((b"iCCP", b"zTXt", b"iTXt"))
_PIXELS = frozenset((b"IDAT", b"fdAT", b"fcTL", b"ANMF", b"VP8 ", b"VP8L", b"ALPH"))


def check_structure(data: bytes) -> None:
    """Raises InvalidRequest for a picture of more parts than any camera or program writes."""
    if data[:2] == _JPEG:
        _check_jpeg(data)
    elif data[:8] == _PNG:
        _check_chunks(data, 8, _PNG_CHUNK, "PNG")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        _check_chunks(data, 12, _WEBP_CHUNK, "WebP")
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        _check_gif(data)


def _check_jpeg(data: bytes) -> None:
    num_scans = num_segments = num_exif = position = 0
    while (found := MARKER.search(data, position)) is not None:
        if not num_scans and found.start() - position > MAX_PADDING:
            raise _too_many("bytes of padding", MAX_PADDING, "JPEG")
        position, marker = found.end(), data[found.end() - 1]
        if marker == _END:
            return
        num_segments += 1
        num_scans += marker == _SCAN
        num_exif += data[position + 2 : position + 8] == b"Exif\0\0"
        if num_scans > MAX_SCANS:
            raise _too_many("scans", MAX_SCANS, "JPEG")
        if num_segments > MAX_SEGMENTS:
            raise _too_many("segments", MAX_SEGMENTS, "JPEG")
        if num_exif > MAX_EXIF_SEGMENTS:
            raise _too_many("EXIF segments", MAX_EXIF_SEGMENTS, "JPEG")
        if marker not in (_START, _TEMPORARY):
            position += max(2, int.from_bytes(data[position : position + 2]))
    if not num_scans and len(data) - position > MAX_PADDING:
        raise _too_many("bytes of padding", MAX_PADDING, "JPEG")


def _check_chunks(data: bytes, position: int, head: struct.Struct, kind: str) -> None:
    is_png = head is _PNG_CHUNK
    num_others = num_pixels = num_deflated = 0
    while position + 8 <= len(data):
        first, second = head.unpack_from(data, position)
        name, length = (second, first) if is_png else (first, second)
        if name == b"IEND":
            return
        if name in _PIXELS:
            num_pixels += 1
        else:
            num_others += 1
            num_deflated += name in _DEFLATED
        if num_pixels > MAX_PIXEL_CHUNKS:
            raise _too_many("chunks of pixels", MAX_PIXEL_CHUNKS, kind)
        if num_others > MAX_OTHER_CHUNKS:
            raise _too_many("chunks beside its pixels", MAX_OTHER_CHUNKS, kind)
        if num_deflated > MAX_DEFLATED_CHUNKS:
            raise _too_many("compressed texts", MAX_DEFLATED_CHUNKS, kind)
        position += length + (12 if is_png else 8 + length % 2)


def _check_gif(data: bytes) -> None:
    """Check what stands before the first frame, the only one that is read."""
    position = 13 + _table_bytes(data[10:11])
    num_blocks = 0
    while (start := data[position : position + 1]) not in (b"", b",", b";"):
        position += 1
        num_blocks += 1
        is_open = start == b"!"
        position += is_open
        while is_open and (size := data[position : position + 1]):
            position += 1 + size[0]
            num_blocks += 1
            is_open = size[0] > 0 and num_blocks <= MAX_BLOCKS
        if num_blocks > MAX_BLOCKS:
            raise _too_many("blocks before its first frame", MAX_BLOCKS, "GIF")


def _table_bytes(flags: bytes) -> int:
    """Return the length of a GIF's table of global colours."""
    return 3 << (1 + (flags[0] & 7)) if flags and flags[0] & 0x80 else 0


def _too_many(parts: str, limit: int, kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"the image is a {kind} file of more than {limit} {parts}: save it anew with any program",
        code="image_too_complex",
    )


#: Segments that programs and cameras have for themselves: comments, and APP1 to APP15 but APP14, which says what
#: the colours are.
_ASIDE = frozenset({*range(0xE1, 0xF0), 0xFE}) - {0xEE}
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
#: Chunks of a PNG that say something of its pixels and whose names begin with a small letter.
_OF_PIXELS = frozenset({b"tRNS", b"acTL", b"fcTL", b"fdAT"})


@dataclass(frozen=True, slots=True)
class Essentials:
    """A file that shows the same picture.

    Attributes:
        exif, xmp: what stood before the pixels, where it is not in ``data`` any more.
    """

    data: bytes
    exif: bytes | None = None
    xmp: bytes | None = None


def essentials(data: bytes, *, head_only: bool = False) -> Essentials:
    """A JPEG or PNG without metadata; other files stay as they are.

    General readers look at all of a file: they inflate its comments, copy its EXIF entry by entry and unpack what
    programs have left in it for themselves. None of that is needed but the orientation, so no reader gets it.

    Args:
        head_only: up to where the pixels begin.
    """
    if data[:2] == _JPEG:
        return _of_jpeg(data, head_only)
    if data[:8] == _PNG:
        return _of_png(data, head_only)
    return Essentials(data)


def _of_jpeg(data: bytes, head_only: bool) -> Essentials:
    kept = [_JPEG]
    exif: bytes | None = None
    xmp: bytes | None = None
    position = since = 2
    while (found := MARKER.search(data, position)) is not None:
        position, marker = found.end(), data[found.end() - 1]
        if marker == _END:  # no picture
            break
        if marker in (_START, _TEMPORARY):
            continue
        start, position = position + 2, position + max(2, int.from_bytes(data[position : position + 2]))
        if marker == _SCAN:
            kept.append(data[since : position if head_only else len(data)])
            break
        if marker in _ASIDE:
            kept.append(data[since : found.start()])
            since = position
            if data.startswith(_EXIF, start):
                exif = data[start:position] if exif is None else exif + data[start + len(_EXIF) : position]
            elif data.startswith(_XMP, start):
                xmp = data[start + len(_XMP) : position]
    else:
        kept.append(data[since:])
    return Essentials(b"".join(kept), exif, xmp)


def _of_png(data: bytes, head_only: bool) -> Essentials:
    kept: list[bytes] = []
    exif: bytes | None = None
    position, since, is_before = 8, 0, True
    while position + 8 <= len(data):
        name = data[position + 4 : position + 8]
        end = position + 12 + int.from_bytes(data[position : position + 4])
        if name == b"IDAT" and head_only:
            return Essentials(b"".join((*kept, data[since : position + 8])), exif)
        is_before = is_before and name != b"IDAT"
        if name[:1].islower() and name not in _OF_PIXELS:
            kept.append(data[since:position])
            since = end
            if name == b"eXIf" and is_before:
                exif = data[position + 8 : end - 4]
        position = end
    return Essentials(b"".join((*kept, data[since:])), exif)
