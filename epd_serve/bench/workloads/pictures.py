"""Pictures for requests: synthesised ones that cost a server what photographs do, or files of a folder.

A picture of one colour, or with the shapes of a test, makes a JPEG of a few kilobytes: decoding, hashing and the
way to the server are then nearly free. These are sums of noise whose contrast falls with its frequency, as it does
in photographs, luminance finer than colour: 1.3 to 2.5 bits a pixel at quality 85, 10 ms of one core for 0.5
megapixels.
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from random import Random

from PIL import Image

from epd_serve.bench.types import Media
from epd_serve.bench.workloads.lengths import Size

_QUALITY = 85
#: How much of an octave's noise is blended in, for each octave from the finest on: a picture's amount of detail.
_DETAIL = (0.012, 0.034)
_CONTRAST = tuple(max(0, min(255, 2 * value - 128)) for value in range(256))
_COLOR_OCTAVE = 3
#: Suffixes of pictures, in small letters, and their types.
PICTURE_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}


def synthesise(size: Size, rng: Random) -> Media:
    """A JPEG of ``size`` (width, height); no two draws of one generator are alike."""
    detail = rng.uniform(*_DETAIL)
    luminance = _plane(size, rng, 0, detail).point(_CONTRAST)
    colors = [_plane(size, rng, _COLOR_OCTAVE, detail) for _ in range(2)]
    data = io.BytesIO()
    Image.merge("YCbCr", (luminance, *colors)).save(data, "JPEG", quality=_QUALITY)
    return Media(mime="image/jpeg", data=data.getvalue())


def _plane(size: Size, rng: Random, finest: int, detail: float) -> Image.Image:
    """Octaves from the coarsest on: what is there is enlarged, and noise of the new resolution blended in."""
    plane: Image.Image | None = None
    octave = finest
    while max(size) >> octave > 6:
        octave += 1
    for level in range(octave, finest - 1, -1):
        at = max(2, size[0] >> level), max(2, size[1] >> level)
        noise = Image.frombytes("L", at, rng.randbytes(at[0] * at[1]))
        if plane is None:
            plane = noise
        else:
            enlarged = plane.resize(at, Image.Resampling.BICUBIC)
            plane = Image.blend(enlarged, noise, min(0.5, detail * (1 + level)))
    assert plane is not None
    return plane.resize(size, Image.Resampling.BICUBIC)


class PictureFolder:
    """Pictures of a folder, as they are. Raises ValueError where there is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"image_dir: {folder} is no folder")
        self._paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_TYPES)
        if not self._paths:
            raise ValueError(f"image_dir: {folder} holds no pictures ({', '.join(PICTURE_TYPES)})")
        self._read = cache(self._read_file)

    def draw(self, rng: Random) -> Media:
        return self._read(rng.randrange(len(self._paths)))

    def _read_file(self, number: int) -> Media:
        path = self._paths[number]
        return Media(mime=PICTURE_TYPES[path.suffix.lower()], data=path.read_bytes())
