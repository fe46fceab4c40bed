"""Periodic reports of an instance's state to gateways."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec

from epd_serve.protocol import instance_state
from epd_serve.rpc.server import Handler, Reply
from epd_serve.types import Stage

#: Gateways expect five reports a second and take an instance without any for stalled (proxy/fleet/monitor.py).
INTERVAL_S = 0.18
#: The latest calls and features that are named to a gateway, the first time.
_MAX_CALLS, _MAX_FEATURES = 1024, 4096

NDJSON = (b"content-type", b"application/x-ndjson")


class Reporter:
    """Writes an instance's state to each caller of ``/reports``, every INTERVAL_S. For the event loop's thread.

    Args:
        load: returns the instance's as of now.
        check_ready: raises Unavailable while there is nothing to report.
    """

    def __init__(
        self,
        load: Callable[[], instance_state.Load],
        check_ready: Callable[[], None],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._load = load
        self._check_ready = check_ready
        self._interval_s = interval_s
        self._ready, self._is_closed, self._epoch = True, False, 0
        self._state_changed = asyncio.Event()
        self._number = 0  # of the last call or feature
        self._calls: deque[tuple[int, str]] = deque(maxlen=_MAX_CALLS)
        self._features: OrderedDict[str, int] = OrderedDict()

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [("GET", "/reports", self._reports)]

    def add_call(self, stage: Stage, request_id: str) -> None:
        """Name a stage call that has come: from now on the load contains it."""
        self._number += 1
        self._calls.append((self._number, stage.value + request_id))

    def add_feature(self, mm_hash: str) -> None:
        """Name a feature that is here or is being made: other requests for it are best sent here."""
        self._number += 1
        self._features[mm_hash] = self._number
        self._features.move_to_end(mm_hash)
        if len(self._features) > _MAX_FEATURES:
            self._features.popitem(last=False)

    def drop_feature(self, mm_hash: str) -> None:
        """Name a feature no more that could not be made."""
        self._features.pop(mm_hash, None)

    def state_changed(self, ready: bool, epoch: int) -> None:
        """Report at once whether the instance takes work, and its epoch."""
        self._ready, self._epoch = ready, epoch
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def close(self) -> None:
        """End all streams, each with a last report that the instance takes no work."""
        self._is_closed = True
        self.state_changed(False, self._epoch)

    async def _reports(self, body: bytes) -> Reply:
        self._check_ready()
        return Reply(headers=(NDJSON,), stream=self._stream())

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        named = 0
        while True:
            changed = self._state_changed
            report = instance_state.Report(
                load=self._load(),
                ready=self._ready and not self._is_closed,
                received=[key for number, key in self._calls if number > named],
                encoded=[mm_hash for mm_hash, number in self._features.items() if number > named],
                epoch=self._epoch,
            )
            named = self._number
            yield msgspec.json.encode(report) + b"\n"
            if self._is_closed:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await changed.wait()
