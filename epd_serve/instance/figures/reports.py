"""Reports of an instance's load to whoever listens: several times a second, and at once when much changes."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from epd_serve.instance.http import Handler, Reply
from epd_serve.protocol import wire
from epd_serve.types import Stage

#: Gateways expect five reports a second and take an instance without any for stalled (proxy/fleet/poller.py).
INTERVAL_S = 0.18
#: Between two reports to one caller, however much changes.
_LEAST_INTERVAL_S = 0.02
#: Calls that came or went since the last report, of which one more is "much": so many, or this part of all.
_MANY, _MANY_PART = 4, 0.25
#: Names of calls and of features in one report; the next one has the rest.
_MAX_NAMES = 300
#: Features that a new listener is told of.
_MAX_ENCODED = 4096

NDJSON = (b"content-type", b"application/x-ndjson")


class _Listener:
    def __init__(self, received: list[str], encoded: list[str]) -> None:
        self.received = received
        self.encoded = encoded
        self.num_changes = 0
        self.much_changed = asyncio.Event()


class Reporter:
    """Writes :class:`~epd_serve.protocol.wire.Report` to each caller of ``/reports``. For the event loop's thread.

    Args:
        load: the instance's as of now.
        check_ready: raises Unavailable while there is nothing to report.
        state: whether the instance takes work, and its epoch.
    """

    def __init__(
        self,
        load: Callable[[], wire.Load],
        check_ready: Callable[[], None],
        *,
        state: Callable[[], tuple[bool, int]] = lambda: (True, 0),
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._state = state
        self._load = load
        self._check_ready = check_ready
        self._is_closed = False
        self._interval_s = interval_s
        self._open: Counter[str] = Counter()
        self._encoded: OrderedDict[str, None] = OrderedDict()
        self._listeners: set[_Listener] = set()

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [("GET", "/reports", self._reports)]

    @contextmanager
    def call(self, stage: Stage, request_id: str) -> Iterator[None]:
        """A stage call that has just come, until it is answered or its answer has begun."""
        key = stage.value + request_id
        self._open[key] += 1
        self._changed(key)
        try:
            yield
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
            self._changed(None)

    def _changed(self, received: str | None) -> None:
        much = max(_MANY, _MANY_PART * len(self._open))
        is_turn = len(self._open) <= 1  # from idle to busy, or back
        for listener in self._listeners:
            if received is not None:
                listener.received.append(received)
            listener.num_changes += 1
            if is_turn or listener.num_changes >= much:
                listener.much_changed.set()

    def will_have(self, mm_hash: str) -> bool:
        """A feature is here, or is being made: it is best asked for here. False where that was said before."""
        if mm_hash in self._encoded:
            self._encoded.move_to_end(mm_hash)
            return False
        self.has_again(mm_hash)
        return True

    def will_not_have(self, mm_hash: str) -> None:
        """It could not be made. Who was told otherwise finds out by asking."""
        self._encoded.pop(mm_hash, None)

    def has_again(self, mm_hash: str) -> None:
        """It had been evicted meanwhile."""
        self._encoded[mm_hash] = None
        if len(self._encoded) > _MAX_ENCODED:
            self._encoded.popitem(last=False)
        for listener in self._listeners:
            listener.encoded.append(mm_hash)

    def state_changed(self) -> None:
        """Tell all listeners now."""
        for listener in self._listeners:
            listener.much_changed.set()

    def close(self) -> None:
        """End all streams, each with a last report that says so."""
        self._is_closed = True
        self.state_changed()

    async def _reports(self, body: bytes) -> Reply:
        self._check_ready()
        return Reply(headers=(NDJSON,), stream=self._stream())

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        listener = _Listener(list(self._open.elements()), list(self._encoded))
        self._listeners.add(listener)
        try:
            while True:
                received, listener.received = listener.received[:_MAX_NAMES], listener.received[_MAX_NAMES:]
                encoded, listener.encoded = listener.encoded[:_MAX_NAMES], listener.encoded[_MAX_NAMES:]
                has_more = bool(listener.received or listener.encoded)
                listener.num_changes = 0
                listener.much_changed.clear()
                ready, epoch = self._state()
                report = wire.Report(
                    load=self._load(),
                    ready=ready and not self._is_closed,
                    received=received,
                    encoded=encoded,
                    epoch=epoch,
                )
                yield msgspec.json.encode(report) + b"\n"
                if self._is_closed:
                    return
                await asyncio.sleep(_LEAST_INTERVAL_S)
                if not has_more:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._interval_s - _LEAST_INTERVAL_S):
                            await listener.much_changed.wait()
        finally:
            self._listeners.discard(listener)
