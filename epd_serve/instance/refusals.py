"""Calls that are sent elsewhere because the instance leaves its role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from epd_serve.errors import DRAINING, InstanceFailed, ServeError, Unavailable


@dataclass(eq=False, slots=True)
class _Call:
    scope: asyncio.Timeout
    has_begun: Callable[[], bool]
    is_spared: Callable[[], bool]


def left(name: str) -> Unavailable:
    """Return the error of a call that is refused: another instance takes it."""
    return Unavailable(f"instance {name} is leaving its role", code=DRAINING)


def moved(name: str) -> InstanceFailed:
    """Return the error of an answer that has begun: another instance goes on with it."""
    return InstanceFailed(f"instance {name} is leaving its role", code=DRAINING)


class Refusals:
    """The calls of one instance that have no answer yet. It belongs to the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: set[_Call] = set()

    def __len__(self) -> int:
        return len(self._calls)

    @asynccontextmanager
    async def call(
        self,
        has_begun: Callable[[], bool],
        refusal: Callable[[str], ServeError] = left,
        is_spared: Callable[[], bool] = lambda: False,
    ) -> AsyncGenerator[None]:
        """Around what answers a call; it is cancelled, and raises ``refusal``, when it is refused.

        Args:
            has_begun: whether anything was computed for it.
            is_spared: whether it ends by other means, and soon.
        """
        call: _Call | None = None
        try:
            async with asyncio.timeout(None) as scope:
                call = _Call(scope, has_begun, is_spared)
                self._calls.add(call)
                try:
                    yield
                finally:
                    self._calls.discard(call)
        except TimeoutError:
            if call is not None and call.scope.expired():
                raise refusal(self._name) from None
            raise

    def refuse(self, *, begun: bool) -> None:
        """Refuse the calls that have not begun; with ``begun``, all."""
        now = asyncio.get_running_loop().time()
        for call in [call for call in self._calls if begun or not call.has_begun()]:
            if not call.scope.expired() and not call.is_spared():
                call.scope.reschedule(now)
