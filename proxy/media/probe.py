"""The facts of videos and sounds, read in processes of their own: a file may crash its reader, or never end."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.media.video import load_pyav
from epd_serve.types import AudioFacts, VideoFacts
from proxy.settings import GatewaySettings

#: Files that are read at once.
_MAX_READS = 2
#: CPU time that reading a file's facts may take; a sound is decoded for it, of a video only the head.
_VIDEO_CPU_S, _SOUND_CPU_S = 2.0, 5.0


class MediaProbe:
    """Reads the facts of videos and sounds. It belongs to one event loop, and is closed."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._reads = asyncio.Semaphore(_MAX_READS)
        self._pool: DecoderPool | None = None

    async def video(self, data: bytes) -> VideoFacts:
        """Raises InvalidRequest for a file that is no video or beyond a limit."""
        load_pyav("videos")  # for an error, before a process is started
        async with self._reads:
            return await self._decoders().facts(data, self._settings.video_limits)

    async def audio(self, data: bytes, file_format: str) -> AudioFacts:
        """The same of a sound. ``file_format``: that the request says; "": none."""
        load_pyav("sounds")
        settings = self._settings
        limits = replace(settings.audio_limits, format=file_format)
        async with self._reads:
            return await self._decoders().audio_facts(data, limits, cpu_s=_SOUND_CPU_S)

    def _decoders(self) -> DecoderPool:
        if self._pool is None:
            limits = MediaLimits(max_pixels=self._settings.gateway.media.max_pixels, max_bytes=0)
            self._pool = DecoderPool(cpu_s=_VIDEO_CPU_S, limits=limits)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
