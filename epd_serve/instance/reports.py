"""Periodic reports of an instance's state to gateways."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from epd_serve.protocol import instance_state
from epd_serve.types import Stage

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

#: Gateways expect five reports a second and take an instance without any for stalled (proxy/fleet.py).
INTERVAL_S = 0.18
#: Limits on the latest calls and features in the first report to a gateway.
_MAX_CALLS, _MAX_FEATURES = 1024, 4096


class Reports:
    """Streams an instance's state to subscribed gateways every INTERVAL_S. Use it on the event loop."""

    def __init__(self, instance: Instance, interval_s: float = INTERVAL_S) -> None:
        self._instance = instance
        self._interval_s = interval_s
        self._is_closed = False
        self._state_changed = asyncio.Event()
        self._number = 0  # of the last call or feature
        self._calls: deque[tuple[int, str]] = deque(maxlen=_MAX_CALLS)
        self._features: OrderedDict[str, int] = OrderedDict()

    def add_call(self, stage: Stage, request_id: str) -> None:
        """Report a received stage call, which the load includes from now on."""
        self._number += 1
        self._calls.append((self._number, stage.value + request_id))

    def add_feature(self, mm_hash: str) -> None:
        """Report a feature stored or being encoded here, to attract other requests for it."""
        self._number += 1
        self._features[mm_hash] = self._number
        self._features.move_to_end(mm_hash)
        if len(self._features) > _MAX_FEATURES:
            self._features.popitem(last=False)

    def drop_feature(self, mm_hash: str) -> None:
        """Stop reporting a feature that could not be encoded."""
        self._features.pop(mm_hash, None)

    def send_now(self) -> None:
        """Send a report at once, after a state change."""
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def close(self) -> None:
        """End all streams, each with a last report that the instance accepts no work."""
        self._is_closed = True
        self.send_now()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield reports, one line of JSON each."""
        named = 0
        while True:
            changed = self._state_changed
            report = instance_state.Report(
                load=self._instance.load(),
                ready=self._instance.is_accepting and not self._is_closed,
                received=[key for number, key in self._calls if number > named],
                encoded=[mm_hash for mm_hash, number in self._features.items() if number > named],
                epoch=self._instance.lifecycle.epoch,
            )
            named = self._number
            yield msgspec.json.encode(report) + b"\n"
            if self._is_closed:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await changed.wait()
