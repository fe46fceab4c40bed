"""From a media item as the request names it to its bytes, size and hash; long work leaves the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media import MediaLimits, mm_hash, parse_data_url, pixel_size
from epd_serve.protocol.messages import MediaSource
from epd_serve.protocol.wire import MediaRef
from proxy.fetch import MediaFetcher

#: Larger items are decoded and hashed in a thread; a smaller one takes less time than the thread switch is worth.
INLINE_BYTES = 256 * 1024

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """A checked media item; ``param`` is its place in the request."""

    data: bytes
    width: int
    height: int
    param: str

    async def name(self, fingerprint: str) -> MediaRef:
        """The item as P knows it, under a model's ``media_fingerprint``."""
        name = await _off_loop(len(self.data), mm_hash, self.data, "image", fingerprint)
        return MediaRef(mm_hash=name, width=self.width, height=self.height)


class MediaLoader:
    """``max_total_bytes`` bounds all media of a request together: fetched ones are no lighter than sent ones;
    ``max_items`` their number."""

    def __init__(self, limits: MediaLimits, fetcher: MediaFetcher, max_total_bytes: int, max_items: int) -> None:
        self._limits = limits
        self._fetcher = fetcher
        self._max_total_bytes = max_total_bytes
        self._max_items = max_items

    async def load(self, sources: Sequence[MediaSource]) -> list[MediaItem]:
        """All items of a request, in order. Raises InvalidRequest with ``param`` for the first that is no good."""
        if len(sources) > self._max_items:
            raise InvalidRequest(
                f"the request has {len(sources)} images over all messages; at most {self._max_items} are accepted",
                param=sources[self._max_items].param,
                code="too_many_images",
            )
        total = 0

        async def load_one(source: MediaSource) -> MediaItem:
            nonlocal total
            item = await self._load(source)
            total += len(item.data)
            if total > self._max_total_bytes:
                raise TooLarge(
                    f"the images of the request have more than {self._max_total_bytes} bytes together; "
                    "send fewer or smaller ones",
                    param=source.param,
                )
            return item

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load_one(source)) for source in sources]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _load(self, source: MediaSource) -> MediaItem:
        try:
            if source.url[:5].lower() == "data:":
                _, data = await _off_loop(len(source.url), parse_data_url, source.url, self._limits.max_bytes)
            else:
                data = await self._fetcher.fetch(source.url)
            # Always in a thread: a small file can have megabytes of compressed text before its pixels.
            width, height = await asyncio.to_thread(pixel_size, data, self._limits)
        except InvalidRequest as error:
            error.param = source.param
            raise
        return MediaItem(data=data, width=width, height=height, param=source.param)


async def _off_loop(nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` here for little work, in a thread for much."""
    if nbytes <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
