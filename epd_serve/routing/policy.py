"""Least-loaded choice of the instances for a request, by modality: text → P, D; image → E per item, P, D."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
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
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        mm_hashes: Sequence[str],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        """An instance for each of a request's distinct items; ``prefill`` itself where no other is left."""


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
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        mm_hashes: Sequence[str],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        """For each item the instance that is encoding it right now, else ``prefill`` if it can, else the one that
        the item's hash points to, so that equal items of several requests, and of several gateways, meet in one
        place and are encoded once; another where that one has its equal share of the load already (consistent
        hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018)."""
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
            return [prefill] * len(mm_hashes)
        load = {record.name: record.load for record in candidates}
        chosen: list[InstanceRecord] = []
        for mm_hash in mm_hashes:
            most = math.ceil((sum(load.values()) + 1) / len(candidates))
            # min() finds the first: one that is encoding the item is chosen whatever its load
            record = min(
                candidates,
                key=lambda one, item=mm_hash, limit=most: (  # type: ignore[misc]
                    item not in one.encoding,
                    load[one.name] >= limit,
                    one is not prefill,
                    _weight(item, one.name),
                ),
            )
            load[record.name] += 1
            chosen.append(record)
        return chosen


def _weight(mm_hash: str, name: str) -> bytes:
    """The lowest of all names' weights is where the item belongs (rendezvous hashing)."""
    return blake2b(f"{mm_hash} {name}".encode(), digest_size=8).digest()


def _ready(table: InstanceTable, stage: Stage, model: str, exclude: Collection[str]) -> list[InstanceRecord]:
    records = [record for record in table.ready(stage, model) if record.name not in exclude]
    if not records:
        known = [record.name for record in table if record.covers(stage)]
        detail = f"waiting for {', '.join(known)}" if known else "the deployment has none"
        raise Unavailable(f"no instance for {_STAGE_NAMES[stage]} ({stage}) is ready: {detail}; try again shortly")
    return records


def _route_cost(route: Route) -> tuple[int, int]:
    return (route.prefill.load + route.decode.load, route.prefill.num_chosen + route.decode.num_chosen)
