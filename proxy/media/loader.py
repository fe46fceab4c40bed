"""From a media item as the request names it to its bytes, size and hash; long work leaves the event loop."""

from __future__ import annotations

import asyncio
import binascii
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import msgspec
import pybase64
from blake3 import blake3

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media.picture import low_detail_size, plain_size
from epd_serve.media.video import VideoLimits, pack_frames
from epd_serve.protocol.openai.messages import MediaSource
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import MODALITIES, Modality
from proxy.media.fetch import MediaFetcher
from proxy.media.probe import MediaProbe
from proxy.settings import GatewaySettings

#: Items of a request that are fetched at a time.
MAX_FETCHES = 8
#: The images of a request have at most as many pixels together as so many of the largest.
MAX_LARGEST = 4
#: Larger items are decoded and hashed in a thread; a smaller one takes less time than the thread switch is worth.
INLINE_BYTES = 512 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """A checked media item; ``param`` is its place in the request.

    ``num_pixels`` are those that an image is decoded to. ``ref`` is the item as P knows it; its name is that under
    ``fingerprint`` and with the request's ``salt``, or "" where it has none yet.
    """

    data: bytes
    ref: MediaRef
    param: str
    num_pixels: int = 0
    fingerprint: str = ""
    salt: str = ""

    async def name(self, fingerprint: str) -> MediaRef:
        """The item as P knows it, under a model's ``media_fingerprint``."""
        if self.ref.mm_hash and fingerprint == self.fingerprint:
            return self.ref
        name = await _off_loop(len(self.data), mm_hash, self.data, _kind(self.ref), fingerprint, self.salt)
        return msgspec.structs.replace(self.ref, mm_hash=name)


class MediaLoader:
    """Loads the media of requests. Those of one request together are bounded as its body is."""

    def __init__(self, settings: GatewaySettings, fetcher: MediaFetcher, probe: MediaProbe) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._probe = probe

    async def load(self, sources: Sequence[MediaSource], fingerprint: str = "", salt: str = "") -> list[MediaItem]:
        """All items of a request, in order. Raises InvalidRequest with ``param`` for the first that is no good.

        Those that the request holds are named at once under the ``fingerprint`` of the model that they are most
        likely for, while their bytes are at hand; "": not yet.
        Items of another ``salt`` have other names.
        """
        gateway = self._settings.gateway
        if len(sources) > (most := gateway.media.max_items):
            raise InvalidRequest(
                f"the request has {len(sources)} media items over all messages; at most {most} are accepted",
                param=sources[most].param,
                code="too_many_media",
            )
        here: list[MediaItem | None] = []
        for source in sources:
            if source.processing:
                _check_bounds(source, gateway.media.max_pixels)
            is_little = len(source.url) <= INLINE_BYTES
            is_here = source.modality == "image" and source.is_inline and is_little
            read = self._read(source, fingerprint, salt) if is_here else None
            here.append(read if isinstance(read, MediaItem) else None)
        loaded = [item for item in here if item is not None]
        max_pixels = MAX_LARGEST * gateway.media.max_pixels
        _check_pixels(loaded, max_pixels)
        if len(loaded) == len(sources):
            return loaded
        fetches = asyncio.Semaphore(MAX_FETCHES)

        async def load(source: MediaSource) -> MediaItem:
            item = await self._load(source, fingerprint, salt, fetches)
            loaded.append(item)
            _check_total(loaded, gateway.max_body_bytes)
            _check_pixels(loaded, max_pixels)
            return item

        try:
            async with asyncio.TaskGroup() as group:
                found = [
                    group.create_task(load(source)) if item is None else item
                    for source, item in zip(sources, here, strict=True)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [one if isinstance(one, MediaItem) else one.result() for one in found]

    async def _load(
        self, source: MediaSource, fingerprint: str, salt: str, fetches: asyncio.Semaphore
    ) -> MediaItem:
        try:
            if source.modality == "video":
                data, ref = await self._video(source, fetches)
                ref = msgspec.structs.replace(ref, processing=source.processing)
                return MediaItem(data=data, ref=ref, param=source.param, salt=salt)
            if source.modality == "audio":
                data = await self._bytes(source, fetches, self._settings.audio_limits.max_bytes)
                audio = await self._probe.audio(data, source.format)
                ref = msgspec.structs.replace(MediaRef.of_audio(audio), processing=source.processing)
                return MediaItem(data=data, ref=ref, param=source.param, salt=salt)
            if source.is_inline:
                read = await _off_loop(len(source.url), self._read, source, fingerprint, salt)
                if isinstance(read, MediaItem):
                    return read
                data = read
            else:
                async with fetches:
                    data = await self._fetcher.fetch(source.url)
            size = self._plain_size(data) or await self._probe.picture(data)
        except InvalidRequest as error:
            error.param = source.param
            raise
        return _item(source, data, size, "", salt)

    def _read(self, source: MediaSource, fingerprint: str, salt: str) -> MediaItem | bytes:
        """An image of the request's own; its bytes where its size is not plain to see."""
        try:
            data = _decoded(source, self._settings.media_limits.max_bytes)[1]
        except InvalidRequest as error:
            error.param = source.param
            raise
        size = self._plain_size(data)
        return data if size is None else _item(source, data, size, fingerprint, salt)

    async def _video(self, source: MediaSource, fetches: asyncio.Semaphore) -> tuple[bytes, MediaRef]:
        """The bytes of a video, without a name as yet."""
        settings = self._settings
        limits = settings.video_limits
        is_list = source.is_inline and source.url[: len(_FRAME_LIST)].lower() == _FRAME_LIST
        if is_list:
            data = await asyncio.to_thread(_read_list, source, limits)
            facts = await self._probe.frame_list(data, source.sampling.fps or 1.0)
        else:
            data = await self._bytes(source, fetches, limits.max_bytes)
            facts = await self._probe.video(data)
        ref = MediaRef.of_video(facts, source.sampling)
        if ref.num_asked > _MAX_SAMPLED_FRAMES:
            raise InvalidRequest(
                f"{ref.num_asked} frames of the video are to be encoded; at most {_MAX_SAMPLED_FRAMES} are: "
                'ask for fewer with media_io_kwargs {"video": {"num_frames": ...}}',
                code="video_too_large",
            )
        return data, ref

    async def _bytes(self, source: MediaSource, fetches: asyncio.Semaphore, max_bytes: int) -> bytes:
        """The file of a video or sound."""
        if source.is_inline:
            return (await _off_loop(len(source.url), _decoded, source, max_bytes))[1]
        async with fetches:
            return await self._fetcher.fetch(source.url, max_bytes=max_bytes)

    def _plain_size(self, data: bytes) -> tuple[int, int] | None:
        """Within the limits; what is not is Pillow's to explain."""
        limits = self._settings.media_limits
        size = plain_size(data) if len(data) <= limits.max_bytes else None
        return size if size is not None and size[0] * size[1] <= limits.max_pixels else None


def _check_total(items: Sequence[MediaItem], max_bytes: int) -> None:
    total = 0
    for item in items:
        total += len(item.data)
        if total > max_bytes:
            raise TooLarge(
                f"the media of the request have more than {max_bytes} bytes together; send fewer or smaller ones",
                param=item.param,
            )


def _check_pixels(items: Sequence[MediaItem], most: int) -> None:
    total = 0
    for item in items:
        total += item.num_pixels
        if total > most:
            raise InvalidRequest(
                f"the images of the request have more than {most} pixels together; send fewer or smaller ones",
                param=item.param,
                code="too_many_pixels",
            )


def _item(source: MediaSource, data: bytes, size: tuple[int, int], fingerprint: str, salt: str) -> MediaItem:
    width, height = low_detail_size(size) if source.low_detail else size
    ref = MediaRef("", width, height, low_detail=(width, height) != size, processing=source.processing)
    if fingerprint:
        ref = msgspec.structs.replace(ref, mm_hash=mm_hash(data, _kind(ref), fingerprint, salt))
    num_pixels = size[0] * size[1]
    return MediaItem(
        data=data, ref=ref, param=source.param, num_pixels=num_pixels, fingerprint=fingerprint, salt=salt
    )


def _kind(ref: MediaRef) -> str:
    """The part of a name that says how the bytes are read."""
    processing = f" {ref.processing}" if ref.processing else ""
    if ref.modality == "image":
        return ("image/low" if ref.low_detail else "image") + processing
    if ref.modality == "audio":
        return "audio" + processing
    asked = msgspec.json.encode(ref.sampling).decode()
    return f"video{'/list' if ref.is_list else ''} {asked}{processing}"


def _check_bounds(source: MediaSource, max_pixels: int) -> None:
    """Raise InvalidRequest for a request that would have a picture made larger than one may be."""
    asked: dict[str, Any] = msgspec.json.decode(source.processing)
    numbers = [asked, *(one for one in asked.values() if isinstance(one, dict))]
    for name, value in ((name, value) for one in numbers for name, value in one.items()):
        if isinstance(value, int) and value > max_pixels:
            raise InvalidRequest(
                f"mm_processor_kwargs: {name} is {value}; at most {max_pixels} pixels are taken here",
                param="mm_processor_kwargs",
            )


#: What a frame list begins with.
#: Most frames of a video that a request may ask for; the model's own limit holds for others.
_MAX_SAMPLED_FRAMES = 768
_FRAME_LIST = "data:video/jpeg;"


def _read_list(source: MediaSource, limits: VideoLimits) -> bytes:
    """Return the frames of a list that are wanted, as one file."""
    sampling = source.sampling
    header, comma, text = source.url.partition(",")
    header, parts = header + comma, text.split(",")
    if sampling.num_frames is not None:
        parts = parts[: sampling.num_frames]
    if len(parts) > limits.max_frames:
        raise InvalidRequest(
            f"the video has {len(parts)} frames; at most {limits.max_frames} are taken", code="video_too_large"
        )
    return pack_frames([decode_data_url(header, part, limits.max_bytes, "video")[1] for part in parts])


def _decoded(source: MediaSource, max_bytes: int) -> tuple[str, bytes]:
    """Media type and bytes of an item that the request holds."""
    if source.raw is not None:
        return "", source.raw
    return parse_data_url(source.url, max_bytes, source.modality)


async def _off_loop(nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` here for little work, in a thread for much."""
    if nbytes <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def parse_data_url(url: str, max_bytes: int, modality: Modality = "image") -> tuple[str, bytes]:
    """``data:image/png;base64,...`` → (media type in lower case, bytes).

    The media type may be left out ("" then). Raises InvalidRequest with what is wrong, TooLarge before decoding
    where the text is too long for ``max_bytes``.
    """
    header, comma, text = url.partition(",")
    return decode_data_url(header + comma, text, max_bytes, modality)


def decode_data_url(header: str, text: str, max_bytes: int, modality: Modality = "image") -> tuple[str, bytes]:
    """The same for a data URL in two parts: up to its first comma, and the rest."""
    read = _media_type if len(header) <= 64 else _media_type.__wrapped__
    media_type = read(header, modality)
    if len(text) // 4 * 3 > max_bytes + 2:
        raise TooLarge(f"the {modality} has about {len(text) // 4 * 3} bytes; at most {max_bytes} are accepted")
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"the base64 text of the data URL cannot be decoded ({error}); use the standard alphabet (A-Z a-z 0-9 "
            f"+ /) with '=' padding and without line breaks"
        ) from error
    return media_type, data


@lru_cache(maxsize=256)
def _media_type(header: str, modality: Modality) -> str:
    """The media type of a data URL, by what is before its text."""
    example = f"'data:{_EXAMPLES[modality]};base64,...'"
    if header[:5].lower() != "data:" or not header.endswith(","):
        raise InvalidRequest(f"{header[:40]!r} is no data URL; it should look like {example}")
    media_type, *parameters = header[5:-1].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidRequest(f"the data URL is not base64; it should look like {example}")
    media_type = media_type.strip().lower()
    if media_type and not media_type.startswith(f"{modality}/"):
        other = next((one for one in MODALITIES if media_type.startswith(f"{one}/")), "")
        remedy = f"; send it as {other}_url" if other else ""
        raise InvalidRequest(
            f"the data URL has media type {media_type[:60]!r}; only {modality}/... is supported{remedy}"
        )
    return media_type


_EXAMPLES: dict[Modality, str] = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}


def mm_hash(data: bytes, modality: str, fingerprint: str, salt: str = "") -> str:
    """Name of a media item's feature: 64 hex digits of blake3.

    Over the media bytes, the modality, the model's ``media_fingerprint`` and the request's salt, if it has one;
    each field is preceded by its length, so that no two different ones give the same input.
    """
    hasher = _named_hasher(modality, fingerprint).copy()
    hasher.update(_LENGTH(len(data)))
    hasher.update(data)
    if salt:
        encoded = salt.encode("utf-8", "surrogatepass")
        hasher.update(_LENGTH(len(encoded)))
        hasher.update(encoded)
    return hasher.hexdigest()


_LENGTH = struct.Struct("<Q").pack


@lru_cache(maxsize=64)
def _named_hasher(modality: str, fingerprint: str) -> blake3:
    """A hasher that has taken what stands before an item's bytes."""
    hasher = blake3(b"epd-serve media 1")
    for field in (modality.encode(), fingerprint.encode()):
        hasher.update(_LENGTH(len(field)))
        hasher.update(field)
    return hasher
