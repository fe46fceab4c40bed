"""Load media items: bytes, size and hash. Long work runs off the event loop."""

from __future__ import annotations

import asyncio
import binascii
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import msgspec
import pybase64
from blake3 import blake3
from msgspec.structs import replace

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media.audio import AudioLimits
from epd_serve.media.container import load_pyav
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits, low_detail_size, plain_size
from epd_serve.media.video import VideoLimits, pack_frames
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import MODALITIES, Modality
from proxy.media.fetch import MediaFetcher
from proxy.settings import GatewaySettings
from proxy.tasks import run_all

#: Items of one request fetched at a time.
MAX_FETCHES = 8
#: All images of a request together may have the pixels of this many of the largest.
MAX_LARGEST = 4
#: Larger items are decoded and hashed in a thread; for smaller ones a thread switch takes longer.
INLINE_BYTES = 512 * 1024
#: Concurrent decoder jobs, for unusual pictures and for videos and sounds.
_MAX_READS = 2
#: CPU limits for reading a file's metadata; only sounds are decoded for it.
_PICTURE_CPU_S, _VIDEO_CPU_S, _SOUND_CPU_S = 0.5, 2.0, 5.0
#: More than an hour at 30 frames per second.
_MAX_FRAMES = 1 << 17
#: Most frames of a video that a request may ask for; the model's own limit applies otherwise.
_MAX_SAMPLED_FRAMES = 768
#: Prefix of a video given as a list of frames.
_FRAME_LIST = "data:video/jpeg;"
_EXAMPLES: dict[Modality, str] = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
_LENGTH = struct.Struct("<Q").pack

P = ParamSpec("P")
T = TypeVar("T")


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """A checked media item without its name; ``param`` is its place in the request.

    ``num_pixels`` counts an image's decoded pixels. The ``salt`` is part of the name.
    """

    data: bytes
    ref: MediaRef
    param: str
    num_pixels: int = 0
    salt: str = ""

    async def name(self, fingerprint: str) -> MediaRef:
        """Return the item's reference with its mm_hash under a model's ``media_fingerprint``."""
        kind = _hashed_kind(self.ref)
        digest = await _run_off_loop(len(self.data), mm_hash, self.data, kind, fingerprint, self.salt)
        return replace(self.ref, mm_hash=digest)


class MediaLoader:
    """Loads the media of requests; all media of one request together are limited like its body.

    Unusual files are read in worker processes, because they may crash or stall a decoder.
    """

    def __init__(self, settings: GatewaySettings, fetcher: MediaFetcher) -> None:
        media, max_bytes = settings.gateway.media, settings.gateway.max_body_bytes
        self._settings = settings.gateway
        self._fetcher = fetcher
        self._image_limits = MediaLimits(max_pixels=media.max_pixels, max_bytes=max_bytes)
        self._video_limits = VideoLimits(
            max_pixels=media.max_pixels,
            max_bytes=max_bytes,
            max_frames=_MAX_FRAMES,
            max_seconds=media.max_seconds,
        )
        self._pictures, self._clips = asyncio.Semaphore(_MAX_READS), asyncio.Semaphore(_MAX_READS)
        self._decoders = DecoderPool(cpu_s=_VIDEO_CPU_S, limits=self._image_limits)

    def close(self) -> None:
        self._decoders.close()

    async def load(self, sources: Sequence[MediaSource], salt: str = "") -> list[MediaItem]:
        """Return all items of a request in order. Raises InvalidRequest with ``param`` for an invalid one."""
        media = self._settings.media
        if len(sources) > (most := media.max_items):
            raise InvalidRequest(
                f"the request has {len(sources)} media items; at most {most} are accepted",
                param=sources[most].param,
                code="too_many_media",
            )
        fetches = asyncio.Semaphore(MAX_FETCHES)
        loaded: list[MediaItem] = []

        async def load(source: MediaSource) -> MediaItem:
            try:
                item = await self._load(source, salt, fetches)
            except InvalidRequest as error:
                error.param = error.param or source.param
                raise
            loaded.append(item)
            if sum([len(one.data) for one in loaded]) > (max_bytes := self._settings.max_body_bytes):
                raise TooLarge(
                    f"the media of the request exceed {max_bytes} bytes in total; send fewer or smaller ones",
                    param=item.param,
                )
            if sum([one.num_pixels for one in loaded]) > (max_pixels := MAX_LARGEST * media.max_pixels):
                raise InvalidRequest(
                    f"the images of the request exceed {max_pixels} pixels in total; send fewer or smaller ones",
                    param=item.param,
                    code="too_many_pixels",
                )
            return item

        if len(sources) == 1:
            return [await load(sources[0])]
        return await run_all(load(source) for source in sources)

    async def _load(self, source: MediaSource, salt: str, fetches: asyncio.Semaphore) -> MediaItem:
        num_pixels = 0
        if source.processing:
            _check_bounds(source, self._settings.media.max_pixels)
        if source.modality == "video":
            data, ref = await self._video(source, fetches)
        elif source.modality == "audio":
            data = await self._bytes(source, fetches)
            load_pyav("sounds")  # report a missing package before starting a process
            limits = AudioLimits(
                max_bytes=self._settings.max_body_bytes,
                max_seconds=self._settings.media.max_seconds,
                format=source.format,
            )
            async with self._clips:
                ref = MediaRef.of_audio(await self._decoders.audio_facts(data, limits, cpu_s=_SOUND_CPU_S))
        else:
            data = await self._bytes(source, fetches)
            size = await self._size(data)
            width, height = low_detail_size(size) if source.low_detail else size
            ref, num_pixels = MediaRef("", width, height, low_detail=(width, height) != size), size[0] * size[1]
        if source.processing:
            ref = replace(ref, processing=source.processing)
        return MediaItem(data=data, ref=ref, param=source.param, num_pixels=num_pixels, salt=salt)

    async def _bytes(self, source: MediaSource, fetches: asyncio.Semaphore) -> bytes:
        max_bytes = self._settings.max_body_bytes
        if source.raw is not None:
            return source.raw
        if source.is_inline:
            return await _run_off_loop(len(source.url), decode_data_url, source.url, max_bytes, source.modality)
        async with nullcontext() if self._fetcher.is_fetching(source.url) else fetches:
            return await self._fetcher.fetch(source.url)

    async def _size(self, data: bytes) -> tuple[int, int]:
        """Return the displayed width and height of an image in pixels."""
        limits = self._image_limits
        size = plain_size(data) if len(data) <= limits.max_bytes else None
        if size is not None and size[0] * size[1] <= limits.max_pixels:
            return size
        async with self._pictures:  # Pillow explains a size over the limits
            return await self._decoders.size(data, cpu_s=_PICTURE_CPU_S)

    async def _video(self, source: MediaSource, fetches: asyncio.Semaphore) -> tuple[bytes, MediaRef]:
        limits, list_fps = self._video_limits, None
        if source.is_inline and source.url[: len(_FRAME_LIST)].lower() == _FRAME_LIST:
            list_fps = source.sampling.fps or 1.0
            data = await asyncio.to_thread(_read_list, source, limits)
        else:
            data = await self._bytes(source, fetches)
            load_pyav("videos")
        async with self._clips:
            facts = await self._decoders.facts(data, limits, list_fps)
        ref = MediaRef.of_video(facts, source.sampling)
        if ref.num_asked > _MAX_SAMPLED_FRAMES:
            raise InvalidRequest(
                f"the request samples {ref.num_asked} frames of the video; at most {_MAX_SAMPLED_FRAMES} are "
                'accepted: set media_io_kwargs {"video": {"num_frames": ...}}',
                code="video_too_large",
            )
        return data, ref


def _hashed_kind(ref: MediaRef) -> str:
    """Return how the item's bytes are read, as a part of its name."""
    processing = f" {ref.processing}" if ref.processing else ""
    if ref.modality == "image":
        return ("image/low" if ref.low_detail else "image") + processing
    if ref.modality == "audio":
        return "audio" + processing
    asked = msgspec.json.encode(ref.sampling).decode()
    return f"video{'/list' if ref.is_list else ''} {asked}{processing}"


def _check_bounds(source: MediaSource, max_pixels: int) -> None:
    """Raise InvalidRequest for processor options that would enlarge a picture beyond the limit."""
    asked: dict[str, Any] = msgspec.json.decode(source.processing)
    numbers = [asked, *(one for one in asked.values() if isinstance(one, dict))]
    for name, value in ((name, value) for one in numbers for name, value in one.items()):
        if isinstance(value, int) and value > max_pixels:
            raise InvalidRequest(
                f"mm_processor_kwargs: {name} is {value}; at most {max_pixels} pixels are accepted",
                param="mm_processor_kwargs",
            )


def _read_list(source: MediaSource, limits: VideoLimits) -> bytes:
    """Return the requested frames of a frame list as one file."""
    header, comma, text = source.url.partition(",")
    parts = text.split(",")
    parts = parts[: len(parts) if source.sampling.num_frames in (None, -1) else source.sampling.num_frames]
    if len(parts) > limits.max_frames:
        raise InvalidRequest(
            f"the video has {len(parts)} frames; at most {limits.max_frames} are accepted", code="video_too_large"
        )
    return pack_frames([decode_data_url(header + comma + part, limits.max_bytes, "video") for part in parts])


async def _run_off_loop(nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` directly for small data, else in a thread."""
    if nbytes <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def decode_data_url(url: str, max_bytes: int, modality: Modality = "image") -> bytes:
    """Return the bytes of ``data:image/png;base64,...``; the media type is optional.

    Raises InvalidRequest, or TooLarge before decoding.
    """
    header, comma, text = url.partition(",")
    example = f"'data:{_EXAMPLES[modality]};base64,...'"
    if header[:5].lower() != "data:" or not comma:
        raise InvalidRequest(f"{url[:40]!r} is not a data URL; it should look like {example}")
    media_type, *parameters = header[5:].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidRequest(f"the data URL is not base64; it should look like {example}")
    media_type = media_type.strip().lower()
    if media_type and not media_type.startswith(f"{modality}/"):
        other = next((one for one in MODALITIES if media_type.startswith(f"{one}/")), "")
        remedy = f"; send it as {other}_url" if other else ""
        raise InvalidRequest(
            f"the data URL has media type {media_type[:60]!r}; only {modality}/... is supported{remedy}"
        )
    if "\n" in text:
        text = "".join(text.split())  # mail encoders insert line breaks
    if len(text) // 4 * 3 > max_bytes + 2:
        raise TooLarge(f"the {modality} has about {len(text) // 4 * 3} bytes; at most {max_bytes} are accepted")
    try:
        return bytes(pybase64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"the data URL is not valid base64 ({error}); use the standard alphabet (A-Z a-z 0-9 + /) with '=' "
            "padding"
        ) from error


def mm_hash(data: bytes, modality: str, fingerprint: str, salt: str = "") -> str:
    """Return the name of a media item's feature: 64 hex digits of blake3.

    It covers the modality, the model's ``media_fingerprint``, the media bytes and the request's salt, if any. Each
    field is preceded by its length, so that different fields never form the same input.
    """
    hasher = blake3(b"epd-serve media 1")
    fields = [modality.encode(), fingerprint.encode(), data]
    if salt:
        fields.append(salt.encode("utf-8", "surrogatepass"))
    for field in fields:
        hasher.update(_LENGTH(len(field)))
        hasher.update(field)
    return hasher.hexdigest()
