"""The facts of videos, read in processes of their own: a file may crash its reader, or never end."""

from __future__ import annotations

from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.media.video import load_pyav
from epd_serve.types import VideoFacts
from proxy.media.fetch import FetchPlaces
from proxy.settings import Current

#: Files that are read at once, and how long one waits for its turn.
_NUM_PLACES = 2
_WAIT_S = 20.0


class _Place:
    """A place of a pool that has no others beside it."""

    is_aside = True

    def step_aside(self) -> bool:
        return True

    async def wait_aside(self) -> None:
        raise AssertionError("it stepped aside")


class VideoProbe:
    """Reads the facts of videos; askers take turns. It belongs to one event loop, and is closed at the end."""

    def __init__(self, settings: Current) -> None:
        self._settings = settings
        self._places = FetchPlaces(_NUM_PLACES)
        self._pool: DecoderPool | None = None

    async def facts(self, data: bytes, asker: str) -> VideoFacts:
        """Raises InvalidRequest for a file that is no video or beyond a limit, Overloaded where no turn comes."""
        load_pyav()  # for an error, before a process is started
        settings = self._settings.now
        if self._pool is None:
            limits = MediaLimits(max_pixels=settings.gateway.media.video.max_pixels, max_bytes=0)
            self._pool = DecoderPool(1, cpu_s=settings.gateway.media.video.probe_cpu_s, limits=limits)
        place = await self._places.take(asker, _WAIT_S)
        try:
            return await self._pool.facts(data, settings.video_limits, _Place())
        finally:
            place.give_back()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
