"""Ways to choose instances that the router's own are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import BoundedHash, find_encoders
from epd_serve.routing.routes import ANY, Demand, Route, RoutePolicy, find_candidates
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage


@dataclass(frozen=True)
class RandomOfTwo(RoutePolicy):
    """The cheaper one of two pairs drawn at random (Mitzenmacher 2001): gateways that know the same do not all run
    to the same instance.

    Args:
        draw: a number in [0, 1) each time it is called.
    """

    draw: Callable[[], float] = random.random

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        found = find_candidates(table, model, exclude, demand)
        pairs = found.pairs()
        drawn = [pairs.pop(int(self.draw() * len(pairs))) for _ in range(min(2, len(pairs)))]
        *_, prefill, decode = min(drawn, key=lambda pair: pair[0] + pair[1])
        return found.route(prefill, decode)


class RoundRobinEncoders(BoundedHash):
    """The encoder that was chosen least often."""

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        candidates = find_encoders(table, prefill, exclude) or [prefill]
        counts = {one.name: one.num_chosen[Stage.ENCODE] for one in candidates}
        chosen: list[InstanceRecord] = []
        for _ in items:
            chosen.append(min(candidates, key=lambda one: counts[one.name]))
            counts[chosen[-1].name] += 1
        return chosen


@dataclass(frozen=True)
class RandomOfTwoEncoders(BoundedHash):
    """The one with less to do of two drawn at random; ``draw`` gives numbers in [0, 1)."""

    draw: Callable[[], float] = random.random

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        candidates = find_encoders(table, prefill, exclude) or [prefill]
        pending = {one.name: one.pending.num_pixels for one in candidates}
        chosen: list[InstanceRecord] = []
        for item in items:
            left = list(candidates)
            drawn = [left.pop(int(self.draw() * len(left))) for _ in range(min(2, len(left)))]
            chosen.append(min(drawn, key=lambda one: one.costs.encode_s(pending[one.name])))
            pending[chosen[-1].name] += item.width * item.height
        return chosen
