"""Ways to choose P and D for a request, each one small pure class, and the cheapest pair of P and D.

What a pair costs is a sum of what P costs, what the KV's way costs and what D costs, and that way is one of three.
So each instance is looked at once, and for each P the best D of each distance. The choice is the same as by
:func:`~epd_serve.routing.policy.route_s` of every pair.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any

from epd_serve.cost.stages import NETWORK, SAME_DEVICE, SAME_HOST, link_between
from epd_serve.routing.policy import (
    ANY,
    NEAR_S,
    Demand,
    Parts,
    Route,
    in_turn,
    near_best,
    possible_routes,
    route_parts,
)
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage


def cheapest_of_few(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Route:
    """As :func:`cheapest_pair`, by a look at each pair, which is sooner done where there are few of them."""
    parts = route_parts(table, model, exclude, demand)
    pairs = _costs_of_pairs(parts, demand, cut=False) or _costs_of_pairs(parts, demand, cut=True)
    if len(pairs) == 1:
        return parts.route(*pairs[0][2:])
    best_first, best_rest, *_ = pairs[0]
    for first_s, rest_s, _, _ in pairs:
        if first_s + rest_s < best_first + best_rest:
            best_first, best_rest = first_s, rest_s
    limit_first, limit_rest = best_first + NEAR_S, best_rest + NEAR_S
    turn: tuple[float, int] | None = None
    for first_s, rest_s, prefill, decode in pairs:
        if first_s <= limit_first and rest_s <= limit_rest:
            num_chosen = prefill.num_chosen[Stage.PREFILL] + decode.num_chosen[Stage.DECODE]
            its_turn = (decode.pending.num_sequences, num_chosen)
            if turn is None or its_turn < turn:
                turn, chosen = its_turn, (prefill, decode)
    return parts.route(*chosen)


def _costs_of_pairs(
    parts: Parts, demand: Demand, *, cut: bool
) -> list[tuple[float, float, InstanceRecord, InstanceRecord]]:
    """Seconds before the first token and after it, P and D; ``cut``: of those too that do not reach each other."""
    rests: list[tuple[InstanceRecord, float]] | None = None
    pairs: list[tuple[float, float, InstanceRecord, InstanceRecord]] = []
    for prefill in parts.prefills:
        first_s = parts.first_s(prefill)
        if prefill.covers(Stage.DECODE):
            pairs.append((first_s, parts.rest_s(prefill, demand), prefill, prefill))
            continue
        if rests is None:
            rests = [(decode, parts.rest_s(decode, demand) + decode.encode_s) for decode in parts.decodes]
        nbytes = parts.num_tokens * (prefill.info.kv_token_bytes if prefill.info is not None else 0)
        for decode, rest_s in rests:
            if not cut and decode.name in prefill.cut_off:
                continue
            way_s = link_between(prefill.place, decode.place).seconds(nbytes)
            pairs.append((first_s + way_s, rest_s, prefill, decode))
    return pairs


def cheapest_pair(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Route:
    """Choose the route whose turn it is among the cheapest one and those about equal to it.

    Raises Unavailable that names the stage without a ready instance.
    """
    parts = route_parts(table, model, exclude, demand)
    if any(one.cut_off for one in parts.prefills):
        return cheapest_of_few(table, model, exclude, demand)
    fused = [one.covers(Stage.DECODE) for one in parts.prefills]
    decodes = [] if all(fused) else parts.decodes
    answer = parts.answer
    num_sequences, num_kv_tokens, max_tokens = answer.num_sequences, answer.num_kv_tokens, demand.max_tokens
    rests: list[float] = []
    for decode in decodes:
        rest_s, room_tokens, encode_s = decode.decode_s(num_sequences, max_tokens)
        if num_kv_tokens > room_tokens:
            rest_s += decode.room_s(num_kv_tokens)
        rests.append(rest_s + encode_s)
    places = [_place(one) for one in decodes]
    by_bytes: dict[float, _Ways] = {}
    rows: list[tuple[InstanceRecord, float, _Ways, float | None]] = []
    for prefill, is_fused in zip(parts.prefills, fused, strict=True):
        first_s = parts.first_s(prefill)
        if is_fused:
            rows.append((prefill, first_s, _NO_WAY, parts.rest_s(prefill, demand)))
            continue
        nbytes = parts.num_tokens * (prefill.info.kv_token_bytes if prefill.info is not None else 0)
        ways = by_bytes.get(nbytes)
        if ways is None:
            ways = by_bytes[nbytes] = (
                SAME_DEVICE.seconds(nbytes),
                SAME_HOST.seconds(nbytes),
                NETWORK.seconds(nbytes),
            )
        rows.append((prefill, first_s, ways, None))

    by_rest = _ByPlace(places, rests, range(len(decodes)))
    costs: list[tuple[float, float]] = []
    for prefill, first_s, ways, rest in rows:
        if rest is not None:
            costs.append((first_s, rest))
        else:
            costs += [(first_s + ways[way], rests[index]) for index, way in by_rest.nearest(_place(prefill))]
    best_first, best_rest = min(costs, key=sum)
    limit_first, limit_rest = best_first + NEAR_S, best_rest + NEAR_S

    turns = [(one.pending.num_sequences, one.num_chosen[Stage.DECODE]) for one in decodes]
    by_turn = _ByPlace(places, turns, [index for index, rest in enumerate(rests) if rest <= limit_rest])
    found: list[tuple[float, int, int, InstanceRecord, InstanceRecord]] = []
    for number, (prefill, first_s, ways, rest) in enumerate(rows):
        if first_s + ways[_ON_DEVICE] > limit_first:
            continue
        num_chosen = prefill.num_chosen[Stage.PREFILL]
        if rest is not None:
            if rest <= limit_rest:
                num_chosen += prefill.num_chosen[Stage.DECODE]
                found.append((prefill.pending.num_sequences, num_chosen, number, prefill, prefill))
            continue
        for index, way in by_turn.nearest(_place(prefill)):
            if first_s + ways[way] <= limit_first:
                num_sequences, times = turns[index]
                found.append((num_sequences, num_chosen + times, number, prefill, decodes[index]))
    *_, prefill, decode = min(found, key=lambda one: one[:2])
    return parts.route(prefill, decode)


#: Seconds that the KV is on its way to a D, by how far that is.
_Ways = tuple[float, float, float]
_ON_DEVICE, _ON_HOST, _FAR = range(3)
_NO_WAY = 0.0, 0.0, 0.0


def _place(record: InstanceRecord) -> tuple[str, str]:
    return ("", "") if record.info is None else (record.info.host_id, record.info.device)


class _ByPlace:
    """The lowest value (the first of equal ones) at each distance from a place. Unknown hosts ("") are far."""

    def __init__(self, places: Sequence[tuple[str, str]], values: Sequence[Any], indices: Sequence[int]) -> None:
        devices: dict[tuple[str, str], tuple[Any, int]] = {}
        for index in indices:
            one = values[index], index
            known = devices.get(places[index])
            if known is None or one < known:
                devices[places[index]] = one
        hosts: dict[str, list[tuple[Any, int]]] = {}
        for (host, _), one in devices.items():
            here = hosts.get(host)
            if here is None:
                hosts[host] = [one]
            elif len(here) == 1 or one < here[1]:  # the best two: one of them is on another device
                here[1:] = [one]
                here.sort()
        self._devices = devices
        self._hosts = hosts
        self._best = sorted(found[0] for found in hosts.values())[:2]  # one of them is on another host
        self._places = places
        self._found: dict[tuple[str, str], list[tuple[int, int]]] = {}  # places without a D of their own by host

    def nearest(self, place: tuple[str, str]) -> list[tuple[int, int]]:
        """(index, distance), in the order of the indices."""
        known = place if place in self._devices and place[0] else (place[0], "")
        found = self._found.get(known)
        if found is None:
            found = self._found[known] = self._nearest(*place)
        return found

    def _nearest(self, host: str, device: str) -> list[tuple[int, int]]:
        place = host, device
        found: list[tuple[int, int]] = []
        if host:
            if place in self._devices:
                found.append((self._devices[place][1], _ON_DEVICE))
            here = (index for _, index in self._hosts.get(host, ()) if self._places[index] != place)
            if (index := next(here, None)) is not None:
                found.append((index, _ON_HOST))
        far = (index for _, index in self._best if not host or self._places[index][0] != host)
        if (index := next(far, None)) is not None:
            found.append((index, _FAR))
        return sorted(found)


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
