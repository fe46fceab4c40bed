"""Sizes of pictures, and facts of videos and sounds, read in processes that a file may crash or keep busy."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.video import load_pyav
from epd_serve.types import AudioFacts, VideoFacts
from proxy.settings import GatewaySettings

#: Videos and sounds that are read at once, and pictures that are not plain.
_MAX_READS = 2
#: CPU time that reading a file's facts may take; only a sound is decoded for it.
_PICTURE_CPU_S, _VIDEO_CPU_S, _SOUND_CPU_S = 0.5, 2.0, 5.0


class MediaProbe:
    """Reads facts of media. It belongs to one event loop, and is closed.

    Each method raises InvalidRequest for a file that is broken, is no such media or beyond a limit.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._reads, self._pictures = asyncio.Semaphore(_MAX_READS), asyncio.Semaphore(_MAX_READS)
        self._decoders = DecoderPool(cpu_s=_VIDEO_CPU_S, limits=settings.media_limits)

    async def picture(self, data: bytes) -> tuple[int, int]:
        """Return the width and height in pixels as displayed."""
        async with self._pictures:
            return await self._decoders.size(data, cpu_s=_PICTURE_CPU_S)

    async def video(self, data: bytes) -> VideoFacts:
        load_pyav("videos")  # for an error, before a process is started
        async with self._reads:
            return await self._decoders.facts(data, self._settings.video_limits)

    async def frame_list(self, data: bytes, fps: float) -> VideoFacts:
        """Return the facts of packed frames, so many a second."""
        async with self._reads:
            return await self._decoders.facts(data, self._settings.video_limits, fps)

    async def audio(self, data: bytes, file_format: str) -> AudioFacts:
        """``file_format``: that the request says; "": none."""
        load_pyav("sounds")
        limits = replace(self._settings.audio_limits, format=file_format)
        async with self._reads:
            return await self._decoders.audio_facts(data, limits, cpu_s=_SOUND_CPU_S)

    def close(self) -> None:
        self._decoders.close()
