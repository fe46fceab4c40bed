"""The gateway's language queue: requests without a token whose features are there, and the thieves that take them.

A request is stolen as a whole: its attempt ends, which takes back all that instances have of it, and the next one
runs on the thief alone. Of a request that is stolen once, or whose client has tokens, nothing is stolen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from epd_serve.routing.policy import Route
from epd_serve.routing.stealing import StealRule, Thieves
from epd_serve.routing.table import InstanceRecord, InstanceTable
from proxy.interruption import Interruption

#: HeteroServe, algorithm 1: between two looks at a queue that is long enough.
_IDLE_S = 0.01


class Moved(Exception):
    """A thief has taken the request."""


class Claim:
    """Of one request: which thief has taken it, for as long as the context lasts."""

    __slots__ = ("_queue", "thief")

    def __init__(self, queue: StealQueue) -> None:
        self._queue = queue
        self.thief: InstanceRecord | None = None

    def take(self, thief: InstanceRecord) -> None:
        assert self.thief is None, "a request is stolen once"
        self.thief = thief
        self._queue.thieves.took(thief.name)

    def route(self, before: Route) -> Route:
        """Where the request goes on, with all the work that it was elsewhere."""
        assert self.thief is not None
        work = before.prefill_work + before.decode_work
        return Route(prefill=self.thief, decode=self.thief, prefill_work=work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.thief is not None:
            self._queue.thieves.ended(self.thief.name)
            self._queue.look()


class _Wait(Interruption):
    """See :meth:`StealQueue.until_first`."""

    __slots__ = ("_claim", "_encodes", "_queue", "max_model_len", "model")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: StealQueue,
        claim: Claim,
        model: str,
        max_model_len: int,
        encodes: Sequence[asyncio.Task[None]],
    ) -> None:
        super().__init__(loop)
        self._queue = queue
        self._claim = claim
        self._encodes = encodes
        self.model = model
        self.max_model_len = max_model_len

    @property
    def is_queued(self) -> bool:
        """Whether it waits for a language model, and for no feature any more."""
        return all(encode.done() for encode in self._encodes)

    def move(self, thief: InstanceRecord) -> None:
        self._queue.waits.pop(self)
        self._claim.take(thief)
        self.fire(Moved(f"{thief.name} takes the request"))

    def __enter__(self) -> Self:
        self._queue.waits[self] = None
        self._queue.look()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.waits.pop(self, None)
        super().__exit__(kind, error, trace)


class StealQueue:
    """All requests of one gateway that have no token, the oldest first.

    Args:
        on_move: told of each request that is stolen.
    """

    def __init__(
        self,
        table: InstanceTable,
        rule: StealRule,
        *,
        on_move: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._rule = rule
        self._on_move = on_move
        self._clock = clock
        self.thieves = Thieves(rule)
        self.waits: dict[_Wait, None] = {}
        self._look = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether there is anybody that steals."""
        return self._table.has_thieves

    @property
    def is_looking(self) -> bool:
        """Whether it looks at its queue again and again."""
        return self._look.is_set()

    def claim(self) -> Claim:
        """For one request, around all of its attempts."""
        return Claim(self)

    def until_first(
        self,
        loop: asyncio.AbstractEventLoop,
        claim: Claim,
        model: str,
        route: Route,
        encodes: Sequence[asyncio.Task[None]],
    ) -> _Wait:
        """A block that waits for the first token, and that a theft ends with :class:`Moved`."""
        lengths = [one.info.max_model_len for one in (route.prefill, route.decode) if one.info is not None]
        return _Wait(loop, self, claim, model, min(lengths, default=0), encodes)

    def look(self) -> None:
        """Something has changed; where the queue is too short for thieves, nothing happens."""
        if len(self.waits) > self._rule.threshold:
            self._look.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._look.wait()
            self.poll()
            if len(self.waits) <= self._rule.threshold and self.thieves.collect_until_s(self._clock()) is None:
                self._look.clear()
            await asyncio.sleep(_IDLE_S)

    def poll(self) -> None:
        """Let thieves take what they may now."""
        for model in {wait.model for wait in self.waits}:
            queued = [wait for wait in self.waits if wait.model == model and wait.is_queued]
            for thief in self.thieves.take(self._table, model, len(queued), self._clock()):
                if (wait := _last_for(queued, thief)) is not None:
                    queued.remove(wait)
                    wait.move(thief)
                    self._on_move()


def _last_for(queued: Sequence[_Wait], thief: InstanceRecord) -> _Wait | None:
    """What would wait longest of those that a thief has room for: the first ones may be computed already."""
    longest = 0 if thief.info is None else thief.info.max_model_len
    return next((wait for wait in reversed(queued) if wait.max_model_len <= longest), None)
