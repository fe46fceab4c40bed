"""The order in which sequences get places and blocks while there are too few: keys take turns. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Asker:
    """Who a sequence is computed for.

    Attributes:
        key: stands for the API key, opaque; "" where there are none.
        request_id: of the client's request, which may be several here.
        priority: as in vLLM, a lower number is more urgent.
    """

    key: str = ""
    request_id: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A sequence's claim to a place among those that decode.

    Attributes:
        age: the smaller, the older.
        num_tokens: that it reads when it decodes.
        item: the sequence; None for one that is still to come.
    """

    asker: Asker
    age: tuple[float, int]
    num_tokens: int
    item: Any = None


def in_turn(claims: Iterable[Claim]) -> list[Claim]:
    """The keys take turns, the requests of a key, and the choices of a request, each the oldest first.

    So each key has as many of the first places as any other that could use more, and so has each request of a key.
    """
    of_requests = _numbered(sorted(claims, key=_age), lambda claim: (claim.asker.key, claim.asker.request_id))
    of_keys = _numbered([claim for _, claim in of_requests], lambda claim: claim.asker.key)
    return [claim for _, claim in of_keys]


def _numbered(claims: list[Claim], party: Any) -> list[tuple[int, Claim]]:
    """Each party's first, then each party's second ..."""
    counts: Counter[Any] = Counter()
    numbered = []
    for claim in claims:
        number = counts[party(claim)] = counts[party(claim)] + 1
        numbered.append((number, claim))
    return sorted(numbered, key=lambda one: one[0])


def _age(claim: Claim) -> tuple[float, int]:
    return claim.age


T = TypeVar("T")


def waiting_in_turn(waiting: Iterable[tuple[Asker, T]], num_requests: Counter[str]) -> list[T]:
    """The most urgent first; of these the keys take turns.

    Args:
        waiting: in the order in which each key's own get their turns.
        num_requests: how many turns keys have had: their requests that are not over.
    """
    counts = Counter(num_requests)
    turns: list[tuple[int, int, T]] = []
    for asker, one in waiting:
        turns.append((asker.priority, counts[asker.key], one))
        counts[asker.key] += 1
    turns.sort(key=lambda turn: turn[:2])
    return [one for _, _, one in turns]
