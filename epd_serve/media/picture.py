"""Images: read the size from the header, and decode pixels.

The gateway and the encode instances share this module, so the size that the gateway reads from the header is the
size of the image that the encoder decodes.

:func:`plain_size` reads the size of a plain JPEG or PNG from its first bytes; a corrupt one is noticed when it is
decoded. Pillow reads all other files. It scans the whole file, and a few megabytes can keep it busy for an hour,
so it runs in the processes of :mod:`epd_serve.media.decoder`.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError, features

from epd_serve.errors import InvalidRequest, TooLarge

#: Maximum width and height of an image with ``detail: "low"``, as in OpenAI's API.
LOW_DETAIL_PIXELS = 512
#: Formats that Pillow may try; others are refused before a decoder reads the file.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", *(("AVIF",) if features.check("avif") else ()))
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
#: Limit on the bytes of XMP to search for the orientation.
_MAX_XMP_BYTES = 1 << 20
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: Orientations that rotate by 90°, so width and height are swapped.
_QUARTER_TURNS = frozenset({5, 6, 7, 8})
#: Exceptions that Pillow's decoders raise for corrupt files.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    RuntimeError,  # damaged AVIF
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits on an image: pixels (width × height) and bytes of its file."""

    max_pixels: int
    max_bytes: int


def pixel_size(data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """Return the displayed (width, height) in pixels (EXIF orientation applied), from the header alone.

    Raises InvalidRequest for an unsupported file or too many pixels; TooLarge for too many bytes.
    """
    with _readable(data, limits) as (image, orientation):
        width, height = image.size
        return (height, width) if orientation in _QUARTER_TURNS else (width, height)


def low_detail_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the size of an image scaled down to fit LOW_DETAIL_PIXELS squared (``detail: "low"``)."""
    scale = min(1.0, LOW_DETAIL_PIXELS / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def open_image(
    data: bytes, limits: MediaLimits, before: Callable[[int], None] = lambda num_pixels: None
) -> Image.Image:
    """Decode to RGB as displayed: first frame, EXIF orientation applied, transparency on white.

    The ``size`` of the result equals ``pixel_size`` of the same bytes. ``before`` is called with the number of
    pixels before decoding. Raises like ``pixel_size``, and InvalidRequest for a truncated or corrupt image.
    """
    with _readable(data, limits) as (image, orientation):
        before(image.size[0] * image.size[1])
        image.load()
        picture = _to_rgb(image)
    transpose = _TRANSPOSE.get(orientation)
    return picture if transpose is None else picture.transpose(transpose)


@contextmanager
def _readable(data: bytes, limits: MediaLimits) -> Iterator[tuple[Image.Image, int]]:
    """Open a file without decoding it, and read its orientation; convert Pillow's exceptions to InvalidRequest.

    Only EXIF before the pixels counts for the orientation; decoding may find more after them.
    """
    if not data:
        raise InvalidRequest("the image is empty (0 bytes)")
    if len(data) > limits.max_bytes:
        raise TooLarge(f"the image has {len(data)} bytes; at most {limits.max_bytes} are accepted")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise _too_many_pixels(f"{width}×{height} = {width * height}", limits)
            yield image, _orientation(image)
    except UnidentifiedImageError as error:
        raise InvalidRequest(
            f"the data is not a readable image (it starts with {bytes(data[:8])!r}); "
            f"supported are {', '.join(FORMATS)}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels("far too many", limits) from error
    except _DECODE_ERRORS as error:
        raise InvalidRequest(f"the image is corrupt: {error}") from error


def _too_many_pixels(found: str, limits: MediaLimits) -> InvalidRequest:
    return InvalidRequest(
        f"the image has {found} pixels; at most {limits.max_pixels} are accepted: scale it down before sending"
    )


def _orientation(image: Image.Image) -> int:
    """Return the orientation 1..8 from EXIF, else from XMP; 1 (upright) if missing or invalid."""
    if image.format == "TIFF":  # Pillow applies it itself
        return 1
    value = None
    exif, xmp = image.info.get("exif"), image.info.get("xmp")
    if isinstance(exif, bytes):
        value = exif_orientation(exif)
    if value is None and isinstance(xmp, bytes):
        found = _XMP_ORIENTATION.search(xmp, 0, _MAX_XMP_BYTES)
        value = None if found is None else int(found[1])
    return value if value is not None and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would clip to 255 instead of scaling
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


_ORIENTATION_TAG = 0x0112
_SHORT, _LONG = 3, 4
_BYTES = {_SHORT: 2, _LONG: 4}
_ENTRY_BYTES = 12


def exif_orientation(exif: bytes) -> int | None:
    """Return the orientation tag of the first directory, or None if it is missing or unreadable."""
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


#: Bytes of a file to search for the size, and the smaller number to try first, which usually suffices.
HEADER_BYTES = 128 * 1024
_SHORT_BYTES = 4 * 1024

_PNG = b"\x89PNG\r\n\x1a\n"
#: Bytes of the signature and the first chunk.
_PNG_HEADER_BYTES = 33
#: Chunks before the pixels that do not affect size or orientation.
_PLAIN_CHUNKS = frozenset({b"sRGB", b"gAMA", b"pHYs", b"cHRM", b"sBIT", b"bKGD", b"tIME"})
#: (bit depth, colour type)
_PNG_KINDS = frozenset({(8, 0), (8, 2), (8, 4), (8, 6), (1, 0), (2, 0), (4, 0)})
_JPEG, _EXIF = b"\xff\xd8\xff", b"Exif\0\0"
_SOS, _APP1 = 0xFFDA, 0xFFE1
#: Baseline, extended sequential and progressive frames with Huffman coding.
_FRAMES = frozenset({0xFFC0, 0xFFC1, 0xFFC2})
#: Segments that do not affect the size: tables, comments, application data.
_SKIPPED = frozenset({0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, 0xFFE0, *range(0xFFE2, 0xFFF0)})
_SEGMENT = struct.Struct(">HH").unpack_from
_FRAME = struct.Struct(">HHB").unpack_from


def plain_size(data: bytes) -> tuple[int, int] | None:
    """Return the displayed (width, height) in pixels, or None if Pillow must read the file."""
    read = _jpeg_size if data[:3] == _JPEG else _png_size if data[:8] == _PNG else None
    return None if read is None else read(data[:_SHORT_BYTES]) or read(data[:HEADER_BYTES])


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Return the size if all segments up to the first scan are plain, else None."""
    size: tuple[int, int] | None = None
    orientation: int | None = None
    position, last = 2, len(head) - 4
    while position <= last:
        marker, length = _SEGMENT(head, position)
        start = position + 4
        position += 2 + length
        if length < 2:
            return None
        if marker in _SKIPPED:
            continue
        if position > last + 4:
            return None
        if marker in _FRAMES:
            if size is not None or length < 8 or head[start] != 8:
                return None
            height, width, components = _FRAME(head, start + 1)
            if components not in (1, 3) or length != 8 + 3 * components or not width or not height:
                return None
            size = width, height
        elif marker == _APP1:
            if orientation is not None or head[start : start + len(_EXIF)] != _EXIF:
                return None  # XMP may contain an orientation too
            orientation = exif_orientation(head[start:position]) or 1
        elif marker == _SOS:
            return size[::-1] if size is not None and orientation in _QUARTER_TURNS else size
        else:
            return None
    return None


def _png_size(head: bytes) -> tuple[int, int] | None:
    """Return the size if all chunks up to the first pixels are plain, else None."""
    if len(head) < _PNG_HEADER_BYTES or head[8:16] != b"\0\0\0\rIHDR":
        return None
    width, height, depth, colours = struct.unpack_from(">IIBB", head, 16)
    if (depth, colours) not in _PNG_KINDS or any(head[26:29]) or not width or not height or (width | height) >> 31:
        return None
    position = _PNG_HEADER_BYTES
    while position + 8 <= len(head):
        length, name = struct.unpack_from(">I4s", head, position)
        if name == b"IDAT":
            return width, height
        if name not in _PLAIN_CHUNKS:
            return None
        position += 12 + length
    return None
