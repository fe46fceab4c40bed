"""A policy by the name that a deployment gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import BoundedHash
from epd_serve.routing.policy import ANY, Demand, Route
from epd_serve.routing.routes import LeastLoaded, PrefixAffinity, RandomOfTwo, RoundRobin
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.routing.together import EncoderChoice, Together
from epd_serve.types import Routing


class RouteChoice(Protocol):
    @property
    def uses_prefix(self) -> bool: ...

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route: ...


@dataclass(frozen=True)
class Router:
    """A :class:`~epd_serve.routing.policy.Policy` of two parts."""

    routes: RouteChoice = field(default_factory=LeastLoaded)
    encoders: EncoderChoice = field(default_factory=BoundedHash)

    @property
    def uses_prefix(self) -> bool:
        return self.routes.uses_prefix

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        return self.routes.choose_route(table, model, exclude=exclude, demand=demand)

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        return self.encoders.choose_encoders(table, prefill, items, exclude=exclude)


def router_of(name: Routing, draw: Callable[[], float], *, parallel_encode: bool = True) -> Router:
    """The policy of a deployment; ``draw`` gives numbers in [0, 1). Items always go by :class:`BoundedHash`: each
    by itself, or unless ``parallel_encode`` those of a request to one encoder.
    """
    routes: dict[Routing, Callable[[], RouteChoice]] = {
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
        "random_of_two": lambda: RandomOfTwo(draw),
        "prefix_affinity": PrefixAffinity,
    }
    encoders: EncoderChoice = BoundedHash()
    return Router(routes[name](), encoders if parallel_encode else Together(encoders))
