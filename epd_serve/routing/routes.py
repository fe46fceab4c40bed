"""Ways to choose P and D for a request, each one small pure class."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b

from epd_serve.routing.pairs import cheapest_of_few, cheapest_pair
from epd_serve.routing.policy import ANY, Demand, Route, in_turn, near_best, possible_routes, route_s
from epd_serve.routing.table import InstanceTable

#: Instances whose pairs are sooner looked at one by one than sorted.
_FEW = 8


class LeastLoaded:
    """The pair that costs the request the fewest seconds; about equal ones take turns.

    The same as ``min(near_best(possible_routes(...)), key=in_turn)``, in less time.
    """

    uses_prefix = False

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        if len(table) <= _FEW:
            return cheapest_of_few(table, model, exclude, demand)
        return cheapest_pair(table, model, exclude, demand)


class RoundRobin:
    """The pair that was chosen least often, whatever it has to do."""

    uses_prefix = False

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        return min(possible_routes(table, model, exclude, demand), key=lambda route: route.num_chosen)


@dataclass(frozen=True)
class RandomOfTwo:
    """The cheaper one of two pairs drawn at random (Mitzenmacher 2001): gateways that know the same do not all run
    to the same instance.

    Args:
        draw: a number in [0, 1) each time it is called.
    """

    draw: Callable[[], float]

    uses_prefix = False

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        routes = possible_routes(table, model, exclude, demand)
        drawn = [routes.pop(int(self.draw() * len(routes))) for _ in range(min(2, len(routes)))]
        return min(drawn, key=lambda route: sum(route_s(route, demand)))


class PrefixAffinity:
    """The cheapest pair, where the beginning of a prompt that P has computed before costs nothing.

    So a conversation stays where its KV is as long as others are not less loaded by more than that KV is worth.
    New beginnings go where their hash says among about equal ones, the same way at every gateway.
    """

    uses_prefix = True

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        routes = near_best(possible_routes(table, model, exclude, demand, cached=True), demand)
        if not demand.prefix:
            return min(routes, key=in_turn)
        beginning = demand.prefix[0][1].hex()
        least = min(route.prefill_work.num_tokens for route in routes)
        return min(
            (route for route in routes if route.prefill_work.num_tokens == least),
            key=lambda route: (weight(beginning, route.prefill.name), in_turn(route)),
        )


def weight(key: str, name: str) -> bytes:
    """The weight of a name for a key; the key belongs to the name of the lowest weight (rendezvous hashing)."""
    return blake2b(f"{key} {name}".encode(), digest_size=8).digest()
