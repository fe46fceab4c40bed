"""Least-loaded choice of the instances for a request, by modality: text → P, D; image → E per item, P, D."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from epd_serve.errors import Unavailable
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage

_STAGE_NAMES = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a request's language-model stages run. ``decode is prefill`` where one instance does both."""

    prefill: InstanceRecord
    decode: InstanceRecord

    @property
    def fused(self) -> bool:
        return self.decode is self.prefill

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.prefill.name, self.decode.name})


class Policy(Protocol):
    """Chooses instances; changes nothing."""

    def choose_route(self, table: InstanceTable, model: str, *, exclude: Collection[str] = ()) -> Route:
        """P and D for one request of a model, none of them in ``exclude``.

        Raises Unavailable that names the stage without a ready instance.
        """

    def choose_encoders(
        self, table: InstanceTable, prefill: InstanceRecord, num_items: int, *, exclude: Collection[str] = ()
    ) -> list[InstanceRecord]:
        """An instance for each of a request's items; ``prefill`` itself where no other is left."""


class LeastLoaded:
    """The instance with the least load wins; ties go to the one chosen least often so far."""

    def choose_route(self, table: InstanceTable, model: str, *, exclude: Collection[str] = ()) -> Route:
        prefills = _ready(table, Stage.PREFILL, model, exclude)
        decodes = _ready(table, Stage.DECODE, model, exclude)
        # An instance that covers both decodes what it prefilled: its KV cache need not move.
        routes = [
            Route(prefill=prefill, decode=decode)
            for prefill in prefills
            for decode in ([prefill] if prefill.covers(Stage.DECODE) else decodes)
        ]
        return min(routes, key=_route_cost)

    def choose_encoders(
        self, table: InstanceTable, prefill: InstanceRecord, num_items: int, *, exclude: Collection[str] = ()
    ) -> list[InstanceRecord]:
        fingerprint = prefill.info.media_fingerprint if prefill.info is not None else None
        candidates = [
            record
            for record in table.ready(Stage.ENCODE)
            # An encoder of another model revision or processor would make features under names of its own.
            if record.name not in exclude
            and record.info is not None
            and record.info.media_fingerprint == fingerprint
        ]
        if not candidates:
            return [prefill] * num_items
        assigned = dict.fromkeys((record.name for record in candidates), 0)
        chosen: list[InstanceRecord] = []
        for _ in range(num_items):
            record = min(
                candidates,
                key=lambda one: (
                    one.load + assigned[one.name],
                    one is not prefill,
                    one.num_chosen + assigned[one.name],
                ),
            )
            assigned[record.name] += 1
            chosen.append(record)
        return chosen


def _ready(table: InstanceTable, stage: Stage, model: str, exclude: Collection[str]) -> list[InstanceRecord]:
    records = [record for record in table.ready(stage, model) if record.name not in exclude]
    if not records:
        known = [record.name for record in table if record.covers(stage)]
        detail = f"waiting for {', '.join(known)}" if known else "the deployment has none"
        raise Unavailable(f"no instance for {_STAGE_NAMES[stage]} ({stage}) is ready: {detail}; try again shortly")
    return records


def _route_cost(route: Route) -> tuple[int, int]:
    return (route.prefill.load + route.decode.load, route.prefill.num_chosen + route.decode.num_chosen)
