"""Pictures before any tensor: the size from the header, and the decoded pixels.

The gateway and the encode instances share this file, so that they agree on what a picture is: the size that the
gateway reads from the header is the size of the picture that the encoder opens.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media.essentials import Essentials, essentials
from epd_serve.media.structure import check_structure

#: Width and height that a picture has at most when it is read with ``detail: "low"``, as in OpenAI's API.
LOW_DETAIL_PIXELS = 512
#: What Pillow may try; a file of any other format is refused before a decoder sees it.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
#: A tag behind that is not looked for.
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
#: Orientations 5 to 8 turn the picture by a quarter: width and height change places.
_QUARTER_TURNS = frozenset({5, 6, 7, 8})
#: All that Pillow's decoders were seen to raise on damaged files.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits of one media item: pixels (width × height) and bytes of its file."""

    max_pixels: int
    max_bytes: int


def pixel_size(data: bytes, limits: MediaLimits) -> tuple[int, int]:
    """(width, height) in pixels as displayed (EXIF orientation applied), read from the header alone.

    Raises InvalidRequest for a file that is no supported image or has too many pixels, TooLarge for one with
    too many bytes.
    """
    with _readable(data, limits, head_only=True) as (image, orientation):
        width, height = image.size
        return (height, width) if orientation in _QUARTER_TURNS else (width, height)


def low_detail_size(size: tuple[int, int]) -> tuple[int, int]:
    """Width and height of a picture read with ``detail: "low"``: scaled down to fit LOW_DETAIL_PIXELS squared."""
    scale = min(1.0, LOW_DETAIL_PIXELS / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def open_image(
    data: bytes, limits: MediaLimits, before: Callable[[int], None] = lambda num_pixels: None
) -> Image.Image:
    """Decode to RGB as displayed: first frame, EXIF orientation applied, transparency laid on white.

    Its ``size`` equals ``pixel_size`` of the same bytes. ``before`` is told of the pixels before any is decoded.
    Raises as ``pixel_size`` does, and InvalidRequest for a truncated or damaged picture.
    """
    with _readable(data, limits) as (image, orientation):
        before(image.size[0] * image.size[1])
        image.load()
        picture = _to_rgb(image)
    transpose = _TRANSPOSE.get(orientation)
    return picture if transpose is None else picture.transpose(transpose)


@contextmanager
def _readable(data: bytes, limits: MediaLimits, *, head_only: bool = False) -> Iterator[tuple[Image.Image, int]]:
    """The opened, not yet decoded file and its orientation; whatever Pillow raises inside becomes InvalidRequest.

    The orientation is what stands before the pixels: a decoder may find more EXIF behind them.
    """
    if not data:
        raise InvalidRequest("the image is empty (0 bytes)")
    if len(data) > limits.max_bytes:
        raise TooLarge(f"the image has {len(data)} bytes; at most {limits.max_bytes} are accepted")
    check_structure(data)
    file = essentials(data, head_only=head_only)
    try:
        with Image.open(io.BytesIO(file.data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                raise _too_many_pixels(f"{width}×{height} = {width * height}", limits)
            yield image, _orientation(image, file)
    except UnidentifiedImageError as error:
        raise InvalidRequest(
            f"the data is no image that can be read (it starts with {bytes(data[:8])!r}); "
            f"supported are {', '.join(FORMATS)}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels("far too many", limits) from error
    except _DECODE_ERRORS as error:
        raise InvalidRequest(f"the image is broken: {error}") from error


def _too_many_pixels(found: str, limits: MediaLimits) -> InvalidRequest:
    return InvalidRequest(
        f"the image has {found} pixels; at most {limits.max_pixels} are accepted: scale it down before sending"
    )


def _orientation(image: Image.Image, file: Essentials) -> int:
    """Orientation 1..8 that the header gives in EXIF, else in XMP; 1 (upright) where it says nothing sensible."""
    value = None
    exif, xmp = file.exif or image.info.get("exif"), file.xmp or image.info.get("xmp")
    if isinstance(exif, bytes):
        value = exif_orientation(exif)
    if value is None and isinstance(xmp, bytes):
        found = _XMP_ORIENTATION.search(xmp, 0, _MAX_XMP_BYTES)
        value = None if found is None else int(found[1])
    return value if value is not None and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow would clip to 255 instead of scaling.
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
