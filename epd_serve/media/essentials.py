"""A picture's file without what says nothing about its pixels.

General readers look at all of a file: they inflate its comments, copy its EXIF entry by entry and unpack what
programs have left in it for themselves. None of that is needed here but the orientation, so no reader gets it.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.media.structure import MARKER

_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_START, _TEMPORARY, _END, _SCAN = 0xD8, 0x01, 0xD9, 0xDA
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
    """A JPEG or PNG without metadata, with ``head_only`` up to its pixels; other files stay as they are."""
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
