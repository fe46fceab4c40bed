"""When a request that failed goes to other instances, and which ones it avoids then."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from epd_serve.backends.base import InstanceLost
from epd_serve.errors import DECODE_DRAINING, DRAINING, KV_HELD, Overloaded, ServeError, Unavailable
from epd_serve.routing.policy import ANY, Demand, Policy, Route
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage
from proxy.interruption import Interruption

_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Failover:
    """Limits on what a request may try.

    Attributes:
        max_attempts: of one request, or of each of its choices, the first included.
        wait_s: how long a request waits for an instance to come where none is left for a stage: from when it lost
            its own, or from when there was the last one.
    """

    max_attempts: int = 5
    wait_s: float = 10.0


class InstanceStalled(InstanceLost):
    """An instance has stopped answering, though its connections are open."""

    def __init__(self, name: str) -> None:
        super().__init__(f"instance {name} has stopped answering")
        self.name = name


#: A record, its process, its role and its returns until then.
_Life = tuple[InstanceRecord, int, int, int]


class Suspects:
    """Instances that failed a request: it avoids them, until they are other processes, have another role, or come
    back after an absence."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._lives: dict[str, _Life | None] = {}

    def add(self, names: Collection[str]) -> None:
        self._lives.update((name, self._life(name)) for name in names)

    def names(self) -> set[str]:
        return {name for name, life in self._lives.items() if self._life(name) == life}

    def _life(self, name: str) -> _Life | None:
        record = self._table.get(name)
        if record is None or record.info is None:
            return None
        return record, record.info.pid, record.info.epoch, record.num_returns


@dataclass(slots=True)
class Tried:
    """What a request has tried so far; each of its choices that goes on by itself goes on from there.

    Attributes:
        num_attempts: that count.
        suspects: instances that failed it.
        failure: of the last attempt, where other instances may do better.
    """

    suspects: Suspects
    num_attempts: int = 0
    failure: ServeError | None = None

    def split(self) -> Tried:
        """For one choice: attempts of its own from now on; what fails one choice all of them avoid."""
        return Tried(self.suspects, self.num_attempts, self.failure)


def is_planned(failure: ServeError) -> bool:
    """Whether an instance only leaves its role: nothing speaks against it, nor against another attempt."""
    return failure.code in (DRAINING, DECODE_DRAINING, KV_HELD)


def may_help(failure: ServeError) -> bool:
    """Whether another instance may do better."""
    return failure.status >= 500 or isinstance(failure, Overloaded)


async def substitute(
    table: InstanceTable,
    policy: Policy,
    model: str,
    suspects: Suspects,
    failure: ServeError,
    wait_s: float,
    demand: Demand = ANY,
    *,
    is_expected: bool = False,
) -> Route:
    """Other instances than those that failed; waits where they are being started, or cannot reach each other, or
    where others are expected. Raises ``failure`` then."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        exclude = suspects.names()
        try:
            route = policy.choose_route(table, model, exclude=exclude, demand=demand)
            if not route.is_cut:
                return route
            is_worth_waiting = True
        except Unavailable:
            is_worth_waiting = is_expected or _is_worth_waiting(table, model, exclude)
        if not is_worth_waiting or asyncio.get_running_loop().time() >= deadline:
            raise failure from None
        await asyncio.sleep(_LOOK_AGAIN_S)


def _is_worth_waiting(table: InstanceTable, model: str, exclude: Collection[str]) -> bool:
    for stage in (Stage.PREFILL, Stage.DECODE):
        here = [record for record in table if record.covers(stage)]
        ready = {record.name for record in table.ready(stage, model)}
        if not ready - set(exclude) and not any(record.name not in ready for record in here):
            return False
    return True


class Losses:
    """Tells those that wait for an instance that it has stopped answering."""

    def __init__(self) -> None:
        self._watches: set[LossWatch] = set()

    def report(self, name: str) -> None:
        """The instance is as good as dead."""
        for watch in [one for one in self._watches if name in one.names]:
            watch.fire(InstanceStalled(name))

    def unless_lost(self, loop: asyncio.AbstractEventLoop, names: Collection[str]) -> LossWatch:
        """A block that ends with InstanceStalled as soon as one of the instances is reported."""
        return LossWatch(loop, self._watches, names)


class LossWatch(Interruption):
    """See :meth:`Losses.unless_lost`."""

    __slots__ = ("_watches", "names")

    def __init__(self, loop: asyncio.AbstractEventLoop, watches: set[LossWatch], names: Collection[str]) -> None:
        super().__init__(loop)
        self._watches = watches
        self.names = names

    def __enter__(self) -> Self:
        self._watches.add(self)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watches.discard(self)
        super().__exit__(kind, error, trace)
