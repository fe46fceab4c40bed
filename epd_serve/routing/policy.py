"""Routing policies: their interface, the request's facts that they see, and its cost on two instances."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from epd_serve.cost.stages import NONE, Work, link_between
from epd_serve.errors import Unavailable
from epd_serve.routing.estimates import PRIOR_TOKENS_PER_PIXEL, tokens_per_character
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage

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

    def first_s(self, prefill: InstanceRecord) -> float:
        """Seconds until the first token, without the transfer: prefill and encodes after what waits at P."""
        return first_token_s(prefill, self.prompt.num_tokens)

    def rest_s(self, decode: InstanceRecord, demand: Demand) -> float:
        """Seconds of the answer after its first token, without the encodes that hold up D."""
        return answer_s(decode, self.answer, demand)


def route_parts(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Parts:
    """Collect the instances of which routes are made.

    Decode instances that are too small for the prompt are left out where others are large enough. Raises
    Unavailable that names the stage without a ready instance.
    """
    prefills = ready(table, Stage.PREFILL, model, exclude)
    decodes = ready(table, Stage.DECODE, model, exclude)
    num_tokens = _num_tokens(table, prefills, demand)
    return Parts(
        prefills=prefills,
        decodes=[one for one in decodes if _holds(one, num_tokens)] or decodes,
        num_tokens=num_tokens,
        prompt=Work(num_tokens=max(num_tokens, 1)),
        answer=Work(num_sequences=demand.num_sequences, num_kv_tokens=num_tokens),
        prefix=tuple(digest for _, digest in demand.prefix),
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
    after = answer_s(decode, answer, demand)
    return seconds, after if route.fused else after + decode.encode_s


def first_token_s(prefill: InstanceRecord, num_tokens: float) -> float:
    pending, costs = prefill.pending, prefill.costs
    seconds = costs.prefill_s(pending.num_tokens + num_tokens)
    return seconds + costs.encode_s(pending.num_pixels) if pending.num_pixels else seconds


def answer_s(decode: InstanceRecord, answer: Work, demand: Demand) -> float:
    seconds, room_tokens, _ = decode.decode_s(answer.num_sequences, demand.max_tokens)
    return seconds if answer.num_kv_tokens <= room_tokens else seconds + decode.room_s(answer.num_kv_tokens)


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


def _num_tokens(table: InstanceTable, prefills: Sequence[InstanceRecord], demand: Demand) -> float:
    info = prefills[0].info
    per_pixel = (info.tokens_per_pixel if info is not None else 0.0) or PRIOR_TOKENS_PER_PIXEL
    text = demand.num_characters * tokens_per_character([one.load for one in prefills])
    return demand.num_tokens + text + demand.num_pixels * per_pixel


def _holds(record: InstanceRecord, num_tokens: float) -> bool:
    return record.info is None or num_tokens < record.info.max_model_len


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
