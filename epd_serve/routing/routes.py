"""The choice of P and D for a request: its cost on two instances, the cheapest pair, and the policies.

What a pair costs is a sum of what P costs, what the KV's way costs and what D costs, and that way is one of three.
So where there are many, each instance is looked at once, and for each P the best D of each distance. The choice is
the same as by a look at every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import msgspec

from epd_serve.cost.stages import NETWORK, NONE, SAME_DEVICE, SAME_HOST, Work, link_between
from epd_serve.errors import Unavailable
from epd_serve.routing.encoders import BoundedHash, EncoderChoice, weight
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Routing, Stage

#: Of languages in Latin letters, about, where no prompt was seen yet.
PRIOR_TOKENS_PER_CHARACTER = 0.25


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
    """The instances of a request's language-model stages.

    Attributes:
        fused: whether one instance does both: ``decode is prefill``.
        prefill_work, decode_work: the work that the request is for each of them.
        prefix: hashes of the beginnings of the prompt that ``prefill`` will have in its cache.
        max_model_len: D's; None where it has sent no info.
    """

    prefill: InstanceRecord
    decode: InstanceRecord
    fused: bool = False
    prefill_work: Work = NONE
    decode_work: Work = NONE
    prefix: tuple[bytes, ...] = ()
    max_model_len: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether its P cannot reach its D, as far as is known."""
        return self.decode.name in self.prefill.cut_off


ANY = Demand()


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The instances from which routes are made, and the work that the request is for each of them.

    Attributes:
        num_tokens: tokens of the prompt.
        answer: work of a D.
    """

    prefills: Sequence[InstanceRecord]
    decodes: Sequence[InstanceRecord]
    num_tokens: float
    answer: Work
    prefix: tuple[bytes, ...]

    def route(self, prefill: InstanceRecord, decode: InstanceRecord, num_tokens: float | None = None) -> Route:
        """``num_tokens``: of the prompt that P computes; None: all."""
        prompt = Work(num_tokens=max(self.num_tokens if num_tokens is None else num_tokens, 1))
        fused = decode is prefill
        return Route(
            prefill=prefill,
            decode=decode,
            fused=fused,
            prefill_work=prompt + self.answer if fused else prompt,
            decode_work=NONE if fused else self.answer,
            prefix=self.prefix,
            max_model_len=None if decode.info is None else decode.info.max_model_len,
        )


def route_parts(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Parts:
    """Collect the instances of which routes are made.

    Decode instances that are too small for the prompt are left out where others are large enough. Raises
    Unavailable that names the stage without a ready instance.
    """
    prefills, decodes = table.ready(Stage.PREFILL, model), table.ready(Stage.DECODE, model)
    if exclude:
        prefills = [one for one in prefills if one.name not in exclude]
        decodes = [one for one in decodes if one.name not in exclude]
    if not prefills or not decodes:
        raise _unavailable(table, Stage.DECODE if prefills else Stage.PREFILL)
    info = prefills[0].info
    per_pixel = (info.tokens_per_pixel if info is not None else 0.0) or PRIOR_TOKENS_PER_PIXEL
    # as in the prompts that they saw lately: the median of three or more, else the mean
    ratios = [one.load.tokens_per_character for one in prefills if one.load.tokens_per_character]
    if len(ratios) < 3:  # as it mostly is; median() takes its time
        per_character = sum(ratios) / len(ratios) if ratios else PRIOR_TOKENS_PER_CHARACTER
    else:
        per_character = median(ratios)
    num_tokens = demand.num_tokens + demand.num_characters * per_character + demand.num_pixels * per_pixel
    return Parts(
        prefills=prefills,
        decodes=[one for one in decodes if one.info is None or num_tokens < one.info.max_model_len] or decodes,
        num_tokens=num_tokens,
        answer=Work(num_sequences=demand.num_sequences, num_kv_tokens=num_tokens),
        prefix=tuple(digest for _, digest in demand.prefix) if demand.prefix else (),
    )


#: Seconds that it costs a request until its first token, seconds after that, P and D.
Pair = tuple[float, float, InstanceRecord, InstanceRecord]


def pairs_of(parts: Parts, demand: Demand, *, cached: bool = False) -> list[Pair]:
    """All pairs that can reach each other; where there are none, the pairs that cannot.

    An instance that covers both stages decodes what it prefilled: its KV cache need not move. Before the first
    token: the prefill, after the work that waits at P, encodes there included, and the KV's transfer to D. After:
    the wait for room at D, and the answer's decode, with the time by which it holds up the others.

    Args:
        cached: whether beginnings of the prompt that went to an instance before are no work there.
    """
    rests: list[tuple[InstanceRecord, float]] | None = None
    pairs: list[Pair] = []
    num_cut = 0
    for prefill in parts.prefills:
        num_tokens = uncached_tokens(prefill, parts.num_tokens, demand) if cached else max(parts.num_tokens, 1)
        first_s = first_token_s(prefill, num_tokens)
        if Stage.DECODE in prefill.stages:
            pairs.append((first_s, answer_s(prefill, parts.answer, demand), prefill, prefill))
            continue
        if rests is None:
            rests = [(one, answer_s(one, parts.answer, demand, with_encodes=True)) for one in parts.decodes]
        nbytes = parts.num_tokens * (prefill.info.kv_token_bytes if prefill.info is not None else 0)
        for decode, rest_s in rests:
            way_s = link_between(prefill.place, decode.place).seconds(nbytes)
            pairs.append((first_s + way_s, rest_s, prefill, decode))
            num_cut += decode.name in prefill.cut_off
    if 0 < num_cut < len(pairs):
        return [pair for pair in pairs if pair[3].name not in pair[2].cut_off]
    return pairs


def first_token_s(prefill: InstanceRecord, num_tokens: float) -> float:
    """Seconds of a prefill behind all that waits there."""
    pending, costs = prefill.pending, prefill.costs
    seconds = costs.prefill_s(pending.num_tokens + num_tokens)
    return seconds + costs.encode_s(pending.num_pixels) if pending.num_pixels else seconds


def answer_s(decode: InstanceRecord, answer: Work, demand: Demand, *, with_encodes: bool = False) -> float:
    """Seconds of the answer after its first token; ``with_encodes``: with those that hold up a D."""
    seconds, room_tokens, encode_s = decode.decode_s(answer.num_sequences, demand.max_tokens)
    if answer.num_kv_tokens > room_tokens:
        seconds += decode.room_s(answer.num_kv_tokens)
    return seconds + encode_s if with_encodes else seconds


def _unavailable(table: InstanceTable, stage: Stage) -> Unavailable:
    known = [record.name for record in table if stage in record.stages]
    detail = f"waiting for {', '.join(known)}" if known else "the deployment has none"
    name = "prefill" if stage is Stage.PREFILL else "decode"
    return Unavailable(f"no instance for {name} ({stage}) is ready: {detail}; try again shortly")


def uncached_tokens(record: InstanceRecord, num_tokens: float, demand: Demand) -> float:
    """Those of a prompt that the instance has not computed lately, as far as this gateway knows; at least one."""
    matched = 0
    for num_characters, digest in demand.prefix:
        if digest not in record.prefixes:
            break
        matched = num_characters
    return max(num_tokens * (1 - matched / max(demand.prefix_characters, 1)), 1)


#: Costs that differ by no more seconds count as equal: estimates are no better.
NEAR_S = 1e-3


def near_best(pairs: Sequence[Pair]) -> list[Pair]:
    """The cheapest pair and those about equal to it, before the first token and after it."""
    best_first, best_rest, *_ = pairs[0]
    for first_s, rest_s, _, _ in pairs:
        if first_s + rest_s < best_first + best_rest:
            best_first, best_rest = first_s, rest_s
    limit_first, limit_rest = best_first + NEAR_S, best_rest + NEAR_S
    return [pair for pair in pairs if pair[0] <= limit_first and pair[1] <= limit_rest]


def in_turn(pair: Pair) -> tuple[float, int]:
    """A sort key for pairs of about equal cost: fewest sequences at D, then the pair chosen least often."""
    _, _, prefill, decode = pair
    num_chosen = prefill.num_chosen[Stage.PREFILL] + decode.num_chosen[Stage.DECODE]
    return decode.pending.num_sequences, num_chosen


def cheapest_of_many(parts: Parts, demand: Demand) -> Route:
    """As ``min(near_best(pairs_of(...)), key=in_turn)`` where all P reach all D, without a look at every pair."""
    fused = [Stage.DECODE in one.stages for one in parts.prefills]
    decodes = [] if all(fused) else parts.decodes
    rests = [answer_s(one, parts.answer, demand, with_encodes=True) for one in decodes]
    places = [_place(one) for one in decodes]
    by_bytes: dict[float, _Ways] = {}
    rows: list[tuple[InstanceRecord, float, _Ways, float | None]] = []
    for prefill, is_fused in zip(parts.prefills, fused, strict=True):
        first_s = first_token_s(prefill, max(parts.num_tokens, 1))
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


#: Pairs that are sooner looked at one by one than sorted.
_FEW = 16


class LeastLoaded:
    """The pair that costs the request the fewest seconds; about equal ones take turns."""

    uses_prefix = False

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        parts = route_parts(table, model, exclude, demand)
        prefills, decodes = parts.prefills, parts.decodes
        if len(prefills) == 1 and Stage.DECODE in prefills[0].stages:
            return parts.route(prefills[0], prefills[0])
        if len(prefills) == len(decodes) == 1:
            return parts.route(prefills[0], decodes[0])
        if len(prefills) * len(decodes) > _FEW and not any(one.cut_off for one in prefills):
            return cheapest_of_many(parts, demand)
        *_, prefill, decode = min(near_best(pairs_of(parts, demand)), key=in_turn)
        return parts.route(prefill, decode)


class RoundRobin:
    """The pair that was chosen least often, whatever it has to do."""

    uses_prefix = False

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        parts = route_parts(table, model, exclude, demand)
        *_, prefill, decode = min(pairs_of(parts, demand), key=lambda pair: in_turn(pair)[1])
        return parts.route(prefill, decode)


class PrefixAffinity:
    """The cheapest pair, where the beginning of a prompt that P has computed before costs nothing.

    So a conversation stays where its KV is as long as others are not less loaded by more than that KV is worth.
    New beginnings go where their hash says among about equal ones, the same way at every gateway.
    """

    uses_prefix = True

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        parts = route_parts(table, model, exclude, demand)
        pairs = near_best(pairs_of(parts, demand, cached=True))
        left = {one.name: uncached_tokens(one, parts.num_tokens, demand) for _, _, one, _ in pairs}
        if demand.prefix:
            beginning, least = demand.prefix[0][1].hex(), min(left.values())
            pairs = [pair for pair in pairs if left[pair[2].name] == least]
            *_, prefill, decode = min(pairs, key=lambda pair: (weight(beginning, pair[2].name), in_turn(pair)))
        else:
            *_, prefill, decode = min(pairs, key=in_turn)
        return parts.route(prefill, decode, left[prefill.name])


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
