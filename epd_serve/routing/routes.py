"""The choice of P and D for a request, by the cost of each pair in seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from epd_serve.cost.stages import NONE, Work, link_between
from epd_serve.errors import Unavailable
from epd_serve.routing.encoders import weight
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Routing, Stage

#: Typical of languages in Latin script; used before the first prompt.
PRIOR_TOKENS_PER_CHARACTER = 0.25
#: Costs within this many seconds count as equal: the precision of the estimates.
NEAR_S = 1e-3

#: HeteroServe, section 5.3: queue length above which encoders assist (τ), and an assistant's most sequences (two
#: half batches in the paper).
ASSIST_THRESHOLD, ASSIST_BATCH = 16, 16


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a request before it is tokenised.

    Attributes:
        num_tokens: tokens of a prompt given as token ids.
        max_tokens: limit of each of ``num_sequences`` answers, or None.
        prefix: prefixes of the prompt, shortest first: (characters, hash of text and media).
        prefix_characters: characters of the whole prompt, counting media by their names.
    """

    num_characters: int = 0
    num_tokens: int = 0
    num_pixels: int = 0
    max_tokens: int | None = None
    num_sequences: int = 1
    prefix: tuple[tuple[int, bytes], ...] = ()
    prefix_characters: int = 0


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The instances chosen for P and D.

    Attributes:
        fused: whether both are one instance.
        prefill_work, decode_work: the request's work at P and at D.
        prefix: hashes of the prompt's prefixes, which ``prefill`` will have in its cache.
        max_model_len: D's limit, if known.
    """

    prefill: InstanceRecord
    decode: InstanceRecord
    fused: bool = False
    prefill_work: Work = NONE
    decode_work: Work = NONE
    prefix: tuple[bytes, ...] = ()
    max_model_len: int | None = None

    def at(self, stage: Stage) -> InstanceRecord:
        """Return the instance of P or D."""
        return self.prefill if stage is Stage.PREFILL else self.decode


ANY = Demand()
#: (cost in seconds until the first token, cost after it, P, D)
Pair = tuple[float, float, InstanceRecord, InstanceRecord]


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """The instances that a request may be routed to, and its work.

    Attributes:
        num_tokens: estimated tokens of the prompt.
        answer: work at D.
    """

    prefills: Sequence[InstanceRecord]
    decodes: Sequence[InstanceRecord]
    demand: Demand
    num_tokens: float
    answer: Work

    def pairs(self, *, cached: bool = False) -> list[Pair]:
        """Return the costs of all pairs of P and D; an instance that covers both stages pairs with itself.

        Until the first token: work queued at P (encodes included), the prefill and the KV transfer. After it: the
        wait for KV blocks at D, the decode, and its delay of other answers.

        Args:
            cached: whether prefixes sent to an instance before cost nothing there.
        """
        rests: list[tuple[InstanceRecord, float]] | None = None
        pairs: list[Pair] = []
        for prefill in self.prefills:
            num_tokens = self.uncached_tokens(prefill) if cached else max(self.num_tokens, 1)
            pending, costs = prefill.pending, prefill.costs
            first_s = costs.prefill_s(pending.num_tokens + num_tokens) + costs.encode_s(pending.num_pixels)
            if Stage.DECODE in prefill.stages:
                pairs.append((first_s, self._answer_s(prefill), prefill, prefill))
                continue
            if rests is None:
                rests = [(one, self._answer_s(one) + one.encode_s) for one in self.decodes]
            nbytes = self.num_tokens * (prefill.info.kv_token_bytes if prefill.info is not None else 0)
            for decode, rest_s in rests:
                transfer_s = link_between(prefill.place, decode.place).seconds(nbytes)
                pairs.append((first_s + transfer_s, rest_s, prefill, decode))
        return pairs

    def uncached_tokens(self, prefill: InstanceRecord) -> float:
        """Return the prompt's tokens that P has probably not cached, at least one."""
        matched = 0
        for num_characters, digest in self.demand.prefix:
            if digest not in prefill.prefixes:
                break
            matched = num_characters
        return max(self.num_tokens * (1 - matched / max(self.demand.prefix_characters, 1)), 1)

    def route(self, prefill: InstanceRecord, decode: InstanceRecord, num_tokens: float | None = None) -> Route:
        """Return a route on which P computes ``num_tokens`` of the prompt, by default all."""
        prompt = Work(num_tokens=max(self.num_tokens if num_tokens is None else num_tokens, 1))
        fused = decode is prefill
        return Route(
            prefill=prefill,
            decode=decode,
            fused=fused,
            prefill_work=prompt + self.answer if fused else prompt,
            decode_work=NONE if fused else self.answer,
            prefix=tuple(digest for _, digest in self.demand.prefix),
            max_model_len=None if decode.info is None else decode.info.max_model_len,
        )

    def _answer_s(self, decode: InstanceRecord) -> float:
        """Return the cost of the answer after its first token, in seconds."""
        answer, num_active = self.answer, decode.pending.num_sequences
        seconds = decode.costs.decode_s(answer.num_sequences, num_active, self.demand.max_tokens)
        return seconds + decode.room_s(answer.num_kv_tokens)


def find_candidates(table: InstanceTable, model: str, exclude: Collection[str], demand: Demand) -> Candidates:
    """Return the instances that a request may be routed to, without a D too small for it if others fit.

    Raises Unavailable, which names the stage without an instance.
    """
    prefills = [one for one in table.ready(Stage.PREFILL, model) if one.name not in exclude]
    decodes = [one for one in table.ready(Stage.DECODE, model) if one.name not in exclude]
    if not prefills or not decodes:
        stage = Stage.DECODE if prefills else Stage.PREFILL
        known = [record.name for record in table if stage in record.stages]
        detail = f"waiting for {', '.join(known)}" if known else "the deployment has none"
        name = "prefill" if stage is Stage.PREFILL else "decode"
        raise Unavailable(f"no instance for {name} ({stage}) is ready: {detail}; try again shortly")
    info = prefills[0].info
    per_pixel = (info.tokens_per_pixel if info is not None else 0.0) or PRIOR_TOKENS_PER_PIXEL
    ratios = [one.load.tokens_per_character for one in prefills if one.load.tokens_per_character]
    per_character = fmean(ratios) if ratios else PRIOR_TOKENS_PER_CHARACTER
    num_tokens = demand.num_tokens + demand.num_characters * per_character + demand.num_pixels * per_pixel
    return Candidates(
        prefills=prefills,
        decodes=[one for one in decodes if one.info is None or num_tokens < one.info.max_model_len] or decodes,
        demand=demand,
        num_tokens=num_tokens,
        answer=Work(num_sequences=demand.num_sequences, num_kv_tokens=num_tokens),
    )


def find_assistant(
    table: InstanceTable, model: str, exclude: Collection[str], found: Candidates
) -> InstanceRecord | None:
    """Return an idle encoder to serve a whole text request (HeteroServe, algorithm 1), or None.

    An encoder assists while the language queue is longer than ASSIST_THRESHOLD, its own queue is empty and its
    batch is not full.
    """
    demand = found.demand
    idle = [
        one
        for one in table.ready(Stage.ENCODE, model)
        if one.info is not None
        and one.info.assists
        and one.name not in exclude
        and not (demand.num_pixels or one.in_flight[Stage.ENCODE] or one.pending.num_pixels)
        and one.pending.num_sequences + demand.num_sequences <= ASSIST_BATCH
        and found.num_tokens < min(one.info.max_model_len, one.room_tokens)
    ]
    if not idle:
        return None
    languages = {one.name: one for one in (*found.prefills, *found.decodes)}
    if sum(one.num_queued for one in languages.values()) <= ASSIST_THRESHOLD:
        return None
    return min(idle, key=lambda one: one.pending.num_sequences)


def near_best(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the cheapest pair and those within NEAR_S of it, both before the first token and after it."""
    best_first, best_rest, *_ = min(pairs, key=lambda pair: pair[0] + pair[1])
    limit_first, limit_rest = best_first + NEAR_S, best_rest + NEAR_S
    return [pair for pair in pairs if pair[0] <= limit_first and pair[1] <= limit_rest]


def num_times_chosen(pair: Pair) -> int:
    """Sort key: how often the two instances were chosen."""
    _, _, prefill, decode = pair
    return prefill.num_chosen[Stage.PREFILL] + decode.num_chosen[Stage.DECODE]


def by_use(pair: Pair) -> tuple[float, int]:
    """Sort key of pairs with equal cost: fewest sequences at D, then the pair chosen least often."""
    return pair[3].pending.num_sequences, num_times_chosen(pair)


@dataclass(frozen=True)
class RoutePolicy:
    """Chooses P and D.

    * ``least_loaded``: the cheapest pair; pairs of equal cost take turns.
    * ``round_robin``: the pair chosen least often.
    * ``prefix_affinity``: the cheapest pair when a prefix that P has computed costs nothing, so a conversation
      stays with its KV unless the load there outweighs it. Among equals a new prefix goes by its hash, as at every
      other gateway.
    """

    routing: Routing = "least_loaded"

    @property
    def uses_prefix(self) -> bool:
        return self.routing == "prefix_affinity"

    def choose_route(
        self, table: InstanceTable, model: str, *, exclude: Collection[str] = (), demand: Demand = ANY
    ) -> Route:
        """Return P and D for one request of a model, neither in ``exclude``; changes nothing.

        Raises Unavailable, which names the stage without an instance.
        """
        found = find_candidates(table, model, exclude, demand)
        num_tokens = None
        if (assistant := find_assistant(table, model, exclude, found)) is not None:
            return found.route(assistant, assistant)
        if len(found.prefills) == len(found.decodes) == 1 and not self.uses_prefix:
            [prefill], [decode] = found.prefills, found.decodes
            decode = prefill if Stage.DECODE in prefill.stages else decode
        elif self.routing == "round_robin":
            *_, prefill, decode = min(found.pairs(), key=num_times_chosen)
        elif self.uses_prefix and demand.prefix:
            pairs = near_best(found.pairs(cached=True))
            uncached = {one.name: found.uncached_tokens(one) for _, _, one, _ in pairs}
            digest, num_tokens = demand.prefix[0][1].hex(), min(uncached.values())
            pairs = [pair for pair in pairs if uncached[pair[2].name] == num_tokens]
            *_, prefill, decode = min(pairs, key=lambda pair: (weight(digest, pair[2].name), by_use(pair)))
        else:
            *_, prefill, decode = min(near_best(found.pairs()), key=by_use)
        return found.route(prefill, decode, num_tokens)
