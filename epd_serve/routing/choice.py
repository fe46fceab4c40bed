"""A policy by the name that a deployment gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from epd_serve.routing.encoders import BoundedHash, EncoderChoice, Together
from epd_serve.routing.policy import ANY, Demand, Route
from epd_serve.routing.routes import LeastLoaded, PrefixAffinity, RoundRobin
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Routing


class RouteChoice(Protocol):
    """Chooses P and D; changes nothing."""

    @property
    def uses_prefix(self) -> bool:
        """Whether it looks at :attr:`Demand.prefix`."""

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        """P and D for one request of a model, none of them in ``exclude``.

        Raises Unavailable that names the stage without a ready instance.
        """


@dataclass(frozen=True)
class Router:
    """The choice of a request's P and D, and that of its encoders."""

    routes: RouteChoice = field(default_factory=LeastLoaded)
    encoders: EncoderChoice = field(default_factory=BoundedHash)


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
