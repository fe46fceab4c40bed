import base64
import contextlib
import io
import os
import struct
import textwrap
import time
import zlib
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from pictures import LIMITS, saved, with_scans
from PIL import Image
from places import FakePlace

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import FORMATS, exif_orientation, open_image, pixel_size, plain_size
from proxy.media.loader import decode_data_url, mm_hash


def with_orientation(kind: str, orientation: int) -> bytes:
    image = Image.new("RGB", (48, 32), "white")
    image.paste("red", (0, 0, 24, 16))  # the upper left quarter
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, kind, exif=exif)


@pytest.mark.parametrize("kind", FORMATS)
def test_size_and_picture_agree_in_every_format(kind):
    data = saved(Image.new("RGB", (13, 7), (200, 30, 40)), kind)
    assert pixel_size(data, LIMITS) == open_image(data, LIMITS).size == (13, 7)
    assert open_image(data, LIMITS).mode == "RGB"
    assert all(
        abs(a - b) < 12 for a, b in zip(open_image(data, LIMITS).getpixel((5, 5)), (200, 30, 40), strict=True)
    )


#: Where the upper left quarter is shown, by EXIF orientation.
CORNERS = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}


@pytest.mark.parametrize("kind", [one for one in FORMATS if one not in ("GIF", "BMP")])
@pytest.mark.parametrize("orientation", CORNERS)
def test_exif_orientation_turns_size_and_picture_alike(kind, orientation):
    data = with_orientation(kind, orientation)
    size = (32, 48) if orientation >= 5 else (48, 32)
    picture = open_image(data, LIMITS)
    assert pixel_size(data, LIMITS) == picture.size == size
    assert plain_size(data) == (size if kind == "JPEG" else None)
    column, row = CORNERS[orientation]
    red, green, _ = picture.getpixel((size[0] * (1 + 2 * column) // 4, size[1] * (1 + 2 * row) // 4))
    assert red > 200 and green < 60


def test_transparency_lies_on_white_and_16_bits_are_scaled():
    clear = saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG")
    half = saved(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG")
    palette = Image.new("P", (2, 2), 0)
    palette.info["transparency"] = 0
    assert open_image(clear, LIMITS).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(half, LIMITS).getpixel((0, 0)) == (127, 127, 127)
    assert open_image(saved(palette, "PNG", transparency=0), LIMITS).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(saved(Image.new("I;16", (2, 2), 128 * 256), "PNG"), LIMITS).getpixel((0, 0)) == (128,) * 3


def test_limits():
    data = saved(Image.new("RGB", (100, 50)), "PNG")
    assert pixel_size(data, replace(LIMITS, max_pixels=5000)) == (100, 50)
    for reader in (pixel_size, open_image):
        with pytest.raises(InvalidRequest, match="100×50 = 5000 pixels; at most 4999"):
            reader(data, replace(LIMITS, max_pixels=4999))
        with pytest.raises(TooLarge):
            reader(data, replace(LIMITS, max_bytes=len(data) - 1))


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"%PDF-1.7", b"II*\0" * 9]
)
def test_what_is_no_image_is_refused(data):
    for reader in (pixel_size, open_image):
        with pytest.raises(InvalidRequest):
            reader(data, LIMITS)


SAMPLES = [saved(Image.effect_noise((16, 12), 60).convert("RGB"), kind) for kind in FORMATS]
SAMPLES += [with_orientation("JPEG", 6), with_orientation("PNG", 6)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_files_give_a_picture_or_a_refusal(sample, data):
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    limits = replace(LIMITS, max_pixels=10_000)
    try:
        size = pixel_size(damaged, limits)
        picture = open_image(damaged, limits)
    except InvalidRequest as error:
        assert len(error.message) > 15
    else:
        assert picture.size == size


@pytest.mark.skipif("AVIF" not in FORMATS, reason="this Pillow reads no AVIF")
def test_avif_with_damaged_pixels_is_refused():
    data = saved(Image.effect_noise((64, 48), 60).convert("RGB"), "AVIF")
    head = data[: data.index(b"mdat") + 4]
    damaged = head + b"\xff" * (len(data) - len(head))
    assert pixel_size(damaged, LIMITS) == (64, 48)
    with pytest.raises(InvalidRequest):
        open_image(damaged, LIMITS)


@given(st.binary(max_size=50), st.text(max_size=9), st.text(max_size=9))
def test_the_hash_is_of_full_width_and_tells_its_fields_apart(data, modality, fingerprint):
    name = mm_hash(data, modality, fingerprint)
    assert len(name) == 64 and int(name, 16) >= 0
    assert name == mm_hash(data, modality, fingerprint)
    assert name != blake3(data).hexdigest()
    assert name != mm_hash(data + b"x", modality, fingerprint)
    if fingerprint:
        assert name != mm_hash(data, modality + fingerprint[0], fingerprint[1:])
    if data[:1].isascii() and data:
        assert name != mm_hash(data[1:], modality, fingerprint + data[:1].decode())


@given(
    st.binary(min_size=1, max_size=200),
    st.sampled_from(["", "image/png", "IMAGE/JPEG", "image/png;charset=x"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_data_urls_round_trip_with_and_without_line_breaks(data, media_type, line_end):
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    assert decode_data_url(url, 200) == data
    header, _, text = url.partition(",")
    assert decode_data_url(f"{header},{textwrap.fill(text, 76).replace(chr(10), line_end)}", 200) == data


@given(st.text(max_size=80) | st.text(max_size=80).map(lambda text: f"data:image/png;base64,{text}"))
def test_any_other_text_is_refused_with_a_sentence(url):
    try:
        data = decode_data_url(url, 1000)
    except InvalidRequest as error:
        assert len(error.message) > 15
    else:
        assert base64.b64encode(data).decode() == url.partition(",")[2]


def test_orientation_is_read_as_pillow_reads_it():
    for order, head in (("<", b"II*\0"), (">", b"MM\0*")):
        for kind, form in ((3, "HH"), (4, "I")):
            value = struct.pack(order + form, 6, *[0] * (len(form) - 1))
            entry = struct.pack(order + "HHI", 0x0112, kind, 1) + value
            exif = b"Exif\0\0" + head + struct.pack(order + "IH", 8, 1) + entry + bytes(4)
            picture = Image.open(io.BytesIO(saved(Image.new("RGB", (48, 32)), "JPEG", exif=exif)))
            assert exif_orientation(exif) == picture.getexif()[0x0112] == 6
            assert pixel_size(saved(picture, "PNG", exif=exif), LIMITS) == (32, 48)
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    assert pixel_size(saved(Image.new("RGB", (48, 32)), "JPEG", xmp=xmp), LIMITS) == (32, 48)


@given(st.binary(max_size=80).map(lambda rest: b"II*\0\x08\0\0\0" + rest) | st.binary(max_size=40))
def test_any_exif_gives_a_number_or_nothing(exif):
    assert exif_orientation(exif) is None or exif_orientation(exif) >= 0


def with_segment(kind: int, content: bytes, count: int) -> bytes:
    segment = b"\xff" + bytes([kind]) + struct.pack(">H", 2 + len(content)) + content
    return with_segments(segment, count)


def shared_entries(tag: int) -> bytes:
    """Entries of EXIF or the like that share all of its data."""
    entries = b"".join(struct.pack("<HHII", tag + index % 4096, 1, 60_000, 8) for index in range(5000))
    return b"II*\0" + struct.pack("<IH", 8, 5000) + entries + bytes(4)


#: A megabyte of text.
DEFLATED = b"k\0\0" + zlib.compress(bytes(1_000_000))


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(kind: bytes, content: bytes, count: int, *, behind: bool) -> bytes:
    data = saved(Image.new("RGB", (48, 32)), "PNG")
    cut = data.index(b"IEND" if behind else b"IDAT") - 4
    return data[:cut] + chunk(kind, content) * count + data[cut:]


def with_segments(segment: bytes, count: int) -> bytes:
    data = saved(Image.new("RGB", (48, 32)), "JPEG")
    return data[:2] + segment * count + data[2:]


def with_blocks(block: bytes, count: int) -> bytes:
    data = saved(Image.new("P", (48, 32)), "GIF")
    start = 13 + (3 << (1 + (data[10] & 7)))
    return data[:start] + block * count + data[start:]


def with_webp_chunks(count: int) -> bytes:
    data = saved(Image.new("RGB", (48, 32)), "WEBP", exif=b"II*\0\x08\0\0\0\0\0\0\0\0\0")
    more = data[12:] + struct.pack("<4sI", b"ABCD", 0) * count
    return b"RIFF" + struct.pack("<I", 4 + len(more)) + b"WEBP" + more


ICC = b"x\0\0" + zlib.compress(bytes(100_000))
#: Files that keep a reader busy, from a tenth of a second to an hour.
HOSTILE = {
    "a JPEG of 75000 scans": with_scans(Image.new("RGB", (48, 32)), 75_000),
    "a JPEG of a million empty comments": with_segments(b"\xff\xfe\x00\x02", 10**6),
    "a JPEG of padding": with_segments(b"\xff", 10**7),
    "a JPEG of 100000 EXIF segments": with_segments(b"\xff\xe1\x00\x08Exif\0\0", 100_000),
    "a JPEG of resources": with_segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5000, 90),
    "a JPEG of pictures in one file": with_segment(0xE2, b"MPF\0" + shared_entries(0xB100), 1),
    "a PNG of 500000 texts": with_chunks(b"tEXt", b"k\0v", 500_000, behind=False),
    "a PNG of 500000 texts at its end": with_chunks(b"tEXt", b"k\0v", 500_000, behind=True),
    "a PNG of empty pixel chunks": with_chunks(b"IDAT", b"", 500_000, behind=False),
    "a PNG of comments that inflate": with_chunks(b"zTXt", DEFLATED, 60, behind=False),
    "a PNG of 1000 profiles": with_chunks(b"iCCP", ICC, 1000, behind=False),
    "a GIF of a million comments": with_blocks(b"!\xfe\0", 10**6),
    "a GIF of one comment": with_blocks(b"!\xfe" + b"\x01x" * 10**6 + b"\0", 1),
    "a WebP of a million chunks": with_webp_chunks(10**6),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_picture_takes_no_more_than_its_time(name):
    """It is read, or refused; here nothing is looked at but its first bytes."""
    data, pool = HOSTILE[name], DecoderPool(cpu_s=0.3, limits=replace(LIMITS, max_bytes=1 << 25))
    pool.start()
    own_s, before = time.process_time(), os.times()
    try:
        plain_size(data)
        with contextlib.suppress(InvalidRequest):
            assert await pool.size(data, cpu_s=0.3) == (48, 32)
        with contextlib.suppress(InvalidRequest):
            async with pool.decoded(data, (48, 32), FakePlace()) as pixels:
                assert pixels.shape == (32, 48, 3)
    finally:
        pool.close()
    after = os.times()
    assert time.process_time() - own_s < 0.5
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent_s < 2.5, "the process that forks, and 0.3 s for the size and for the pixels"
