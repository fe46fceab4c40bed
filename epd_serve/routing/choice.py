"""A policy by the name that a deployment gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import BoundedHash, EncoderChoice, Together
from epd_serve.routing.policy import ANY, Demand, Route
from epd_serve.routing.routes import LeastLoaded, PrefixAffinity, RoundRobin
from epd_serve.routing.table import InstanceRecord, InstanceTable
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


_ROUTES: dict[Routing, Callable[[], RouteChoice]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "prefix_affinity": PrefixAffinity,
}


def router_of(name: Routing, *, parallel_encode: bool = True) -> Router:
    """The policy of a deployment. Items always go by :class:`BoundedHash`: each by itself, or unless
    ``parallel_encode`` those of a request to one encoder.
    """
    return Router(_ROUTES[name](), BoundedHash() if parallel_encode else Together(BoundedHash()))
