"""The choice of P and D for a request: its cost on two instances, the cheapest pair, and the policies.

What a pair costs is a sum of what P costs, what the KV's way costs and what D costs, and that way is one of three.
So each instance is looked at once, and for each P the best D of each distance. The choice is the same as by
:func:`route_s` of every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from epd_serve.cost.stages import NETWORK, NONE, SAME_DEVICE, SAME_HOST, Work, link_between
from epd_serve.errors import Unavailable
from epd_serve.routing.encoders import BoundedHash, EncoderChoice, weight
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable, tokens_per_character
from epd_serve.types import Routing, Stage

_STAGE_NAMES = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that are known before it is tokenised.

    Attributes:
        num_tokens: tokens of a prompt that came as token ids.
        max_tokens: of each of ``num_sequences`` answers; None: open-ended.
        prefix: beginnings of the prompt, shorter ones first: (characters, hash of these and the media in them).
        prefix_characters: characters of the whole prompt, in which media count as their names.
    """

    num_characters: int = 0
    num_tokens: int = 0
    num_pixels: int = 0
    max_tokens: int | None = None
    num_sequences: int = 1
    prefix: tuple[tuple[int, bytes], ...] = ()
    prefix_characters: int = 0


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of a request's language-model stages. ``decode is prefill`` where one instance does both.

    Attributes:
        prefill_work, decode_work: the work that the request is for each of them.
        prefix: hashes of the beginnings of the prompt that ``prefill`` will have in its cache.
    """

    prefill: InstanceRecord
    decode: InstanceRecord
    prefill_work: Work = NONE
    decode_work: Work = NONE
    prefix: tuple[bytes, ...] = ()

    @property
    def fused(self) -> bool:
        return self.decode is self.prefill

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.prefill.name, self.decode.name})

    @property
    def is_cut(self) -> bool:
        """Whether its P cannot reach its D, as far as is known."""
        return self.decode.name in self.prefill.cut_off

    @property
    def num_chosen(self) -> int:
        """The number of times that its instances were chosen for their stages."""
        return self.prefill.num_chosen[Stage.PREFILL] + self.decode.num_chosen[Stage.DECODE]

    @property
    def max_model_len(self) -> int | None:
        """The decode instance's max_model_len; None where it has sent no info."""
        return None if self.decode.info is None else self.decode.info.max_model_len


ANY = Demand()


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The instances from which routes are made, and the work that the request is for each of them.

    Attributes:
        num_tokens: tokens of the prompt.
        prompt: work of a P that has none of it cached; answer: work of a D.
    """

    prefills: Sequence[InstanceRecord]
    decodes: Sequence[InstanceRecord]
    num_tokens: float
    prompt: Work
    answer: Work
    prefix: tuple[bytes, ...]

    def route(self, prefill: InstanceRecord, decode: InstanceRecord, prompt: Work | None = None) -> Route:
        prompt = prompt or self.prompt
        fused = decode is prefill
        return Route(
            prefill=prefill,
            decode=decode,
            prefill_work=prompt + self.answer if fused else prompt,
            decode_work=NONE if fused else self.answer,
            prefix=self.prefix,
        )


def route_parts(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Parts:
    """Collect the instances of which routes are made.

    Decode instances that are too small for the prompt are left out where others are large enough. Raises
    Unavailable that names the stage without a ready instance.
    """
    prefills = ready(table, Stage.PREFILL, model, exclude)
    decodes = ready(table, Stage.DECODE, model, exclude)
    info = prefills[0].info
    per_pixel = (info.tokens_per_pixel if info is not None else 0.0) or PRIOR_TOKENS_PER_PIXEL
    text = demand.num_characters * tokens_per_character([one.load for one in prefills])
    num_tokens = demand.num_tokens + text + demand.num_pixels * per_pixel
    return Parts(
        prefills=prefills,
        decodes=[one for one in decodes if one.info is None or num_tokens < one.info.max_model_len] or decodes,
        num_tokens=num_tokens,
        prompt=Work(num_tokens=max(num_tokens, 1)),
        answer=Work(num_sequences=demand.num_sequences, num_kv_tokens=num_tokens),
        prefix=tuple(digest for _, digest in demand.prefix) if demand.prefix else (),
    )


def possible_routes(
    table: InstanceTable, model: str, exclude: Collection[str], demand: Demand, *, cached: bool = False
) -> list[Route]:
    """All pairs of ready instances that can reach each other, with the work that the request is for them.

    Where there are none, the pairs that cannot. An instance that covers both stages decodes what it prefilled: its
    KV cache need not move. Decode instances that are too small for the prompt are left out where others are large
    enough.

    Args:
        cached: whether beginnings of the prompt that went to an instance before are no work there.

    Raises Unavailable that names the stage without a ready instance.
    """
    parts = route_parts(table, model, exclude, demand)
    routes: list[Route] = []
    for prefill in parts.prefills:
        part = _cached_part(prefill, demand) if cached else 0.0
        prompt = Work(num_tokens=max(parts.num_tokens * (1 - part), 1))
        others = [prefill] if prefill.covers(Stage.DECODE) else parts.decodes
        routes += [parts.route(prefill, decode, prompt) for decode in others]
    return [route for route in routes if not route.is_cut] or routes


def route_s(route: Route, demand: Demand) -> tuple[float, float]:
    """Seconds that a route costs until the first token and after it.

    Before: the prefill, after the work that waits at P, encodes there included, and the KV's transfer to D. After:
    the wait for room at D, and the answer's decode, with the time by which it holds up the others.
    """
    prefill, decode = route.prefill, route.decode
    seconds = first_token_s(prefill, route.prefill_work.num_tokens)
    answer = route.prefill_work if route.fused else route.decode_work
    if not route.fused:
        nbytes = answer.num_kv_tokens * (prefill.info.kv_token_bytes if prefill.info else 0)
        seconds += link_between(prefill.place, decode.place).seconds(nbytes)
    after = answer_s(decode, answer, demand, with_encodes=not route.fused)
    return seconds, after


def first_token_s(prefill: InstanceRecord, num_tokens: float) -> float:
    pending, costs = prefill.pending, prefill.costs
    seconds = costs.prefill_s(pending.num_tokens + num_tokens)
    return seconds + costs.encode_s(pending.num_pixels) if pending.num_pixels else seconds


def answer_s(decode: InstanceRecord, answer: Work, demand: Demand, *, with_encodes: bool = False) -> float:
    """Seconds of the answer after its first token; ``with_encodes``: with those that hold up a D."""
    seconds, room_tokens, encode_s = decode.decode_s(answer.num_sequences, demand.max_tokens)
    if answer.num_kv_tokens > room_tokens:
        seconds += decode.room_s(answer.num_kv_tokens)
    return seconds + encode_s if with_encodes else seconds


def ready(table: InstanceTable, stage: Stage, model: str, exclude: Collection[str]) -> list[InstanceRecord]:
    """The ready instances for a stage. Raises Unavailable where there is none."""
    records = table.ready(stage, model)
    if exclude:
        records = [record for record in records if record.name not in exclude]
    if not records:
        known = [record.name for record in table if record.covers(stage)]
        detail = f"waiting for {', '.join(known)}" if known else "the deployment has none"
        raise Unavailable(f"no instance for {_STAGE_NAMES[stage]} ({stage}) is ready: {detail}; try again shortly")
    return records


def _cached_part(record: InstanceRecord, demand: Demand) -> float:
    """The part of a prompt that the instance has computed lately, as far as this gateway knows."""
    matched = 0
    for num_characters, digest in demand.prefix:
        if digest not in record.prefixes:
            break
        matched = num_characters
    return matched / max(demand.prefix_characters, 1)


#: Costs that differ by no more seconds count as equal: estimates are no better.
NEAR_S = 1e-3


def near_best(routes: Sequence[Route], demand: Demand) -> list[Route]:
    """The cheapest route and those about equal to it, before the first token and after it."""
    if len(routes) == 1:
        return list(routes)
    seconds = [route_s(route, demand) for route in routes]
    best_first, best_rest = min(seconds, key=sum)
    return [
        route
        for route, (first, rest) in zip(routes, seconds, strict=True)
        if first <= best_first + NEAR_S and rest <= best_rest + NEAR_S
    ]


def in_turn(route: Route) -> tuple[float, int]:
    """A sort key for routes of about equal cost: fewest sequences at D, then the route chosen least often."""
    prefill, decode = route.prefill, route.decode
    num_chosen = prefill.num_chosen[Stage.PREFILL] + decode.num_chosen[Stage.DECODE]
    return decode.pending.num_sequences, num_chosen


def cheapest_of_few(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Route:
    """As :func:`cheapest_pair`, by a look at each pair, which is sooner done where there are few of them."""
    parts = route_parts(table, model, exclude, demand)
    if len(parts.prefills) == 1:
        [prefill] = parts.prefills
        if prefill.covers(Stage.DECODE):
            return parts.route(prefill, prefill)
        if len(parts.decodes) == 1:
            return parts.route(prefill, parts.decodes[0])
    pairs = _costs_of_pairs(parts, demand, cut=False) or _costs_of_pairs(parts, demand, cut=True)
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
        first_s = first_token_s(prefill, parts.prompt.num_tokens)
        if prefill.covers(Stage.DECODE):
            pairs.append((first_s, answer_s(prefill, parts.answer, demand), prefill, prefill))
            continue
        if rests is None:
            rests = [(one, answer_s(one, parts.answer, demand, with_encodes=True)) for one in parts.decodes]
        nbytes = parts.num_tokens * (prefill.info.kv_token_bytes if prefill.info is not None else 0)
        for decode, rest_s in rests:
            if cut or decode.name not in prefill.cut_off:
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
    rests = [answer_s(one, parts.answer, demand, with_encodes=True) for one in decodes]
    places = [_place(one) for one in decodes]
    by_bytes: dict[float, _Ways] = {}
    rows: list[tuple[InstanceRecord, float, _Ways, float | None]] = []
    for prefill, is_fused in zip(parts.prefills, fused, strict=True):
        first_s = first_token_s(prefill, parts.prompt.num_tokens)
        if is_fused:
            rows.append((prefill, first_s, _NO_WAY, answer_s(prefill, parts.answer, demand)))
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


def router_of(name: Routing) -> Router:
    """The policy of a deployment. Items always go by :class:`BoundedHash`, each by itself."""
    return Router(_ROUTES[name]())
