"""Places for requests whose media are on their way from elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

from epd_serve.errors import Overloaded

#: Requests that may have media fetched at once, or fetched and not running yet.
NUM_PLACES = 512


class FetchPlaces:
    """An asker may have as many places as are free.

    However many requests one sends, and however slowly their media come, the next asker finds places.

    It belongs to one event loop.
    """

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self._num_free = num_places
        self._num_taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = (
            OrderedDict()
        )  # whose turn is next comes first

    @property
    def num_taken(self) -> int:
        return self._num_taken.total()

    async def take(self, asker: str, timeout_s: float) -> FetchPlace:
        """A place, when it is one's turn, which must be given back. Raises Overloaded after ``timeout_s``."""
        place = FetchPlace(self, asker)
        if asker not in self._waiting and self._may_take(asker):
            self._take(asker)
            return place
        turn = asyncio.get_running_loop().create_future()
        own = self._waiting.setdefault(asker, deque())
        own.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                place.give_back()  # it was its turn in the same moment
            elif turn in own:
                own.remove(turn)
                if not own:
                    self._waiting.pop(asker, None)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"images of other requests are still being fetched after {timeout_s:g} s, its limit; "
                    "send fewer requests with image URLs at a time",
                    code="queue_timeout",
                ) from error
            raise
        return place

    def free(self, asker: str) -> None:
        """Give back the place of a :class:`FetchPlace`."""
        self._num_free += 1
        self._num_taken[asker] -= 1
        if not self._num_taken[asker]:
            del self._num_taken[asker]
        while (next_one := next(filter(self._may_take, self._waiting), None)) is not None:
            own = self._waiting.pop(next_one)
            turn = own.popleft()
            if own:
                self._waiting[next_one] = own
            if not turn.done():
                self._take(next_one)
                turn.set_result(None)

    def _may_take(self, asker: str) -> bool:
        return self._num_taken[asker] < self._num_free

    def _take(self, asker: str) -> None:
        self._num_free -= 1
        self._num_taken[asker] += 1


class FetchPlace:
    """See :meth:`FetchPlaces.take`."""

    __slots__ = ("_asker", "_places")

    def __init__(self, places: FetchPlaces, asker: str) -> None:
        self._places: FetchPlaces | None = places
        self._asker = asker

    def give_back(self) -> None:
        """Any number of times."""
        places, self._places = self._places, None
        if places is not None:
            places.free(self._asker)
