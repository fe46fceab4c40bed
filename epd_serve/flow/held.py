"""The KV of an answer whose decode instance leaves: where it lies, and by which route it goes on."""

from __future__ import annotations

from msgspec import Struct

from epd_serve.cost.stages import Work
from epd_serve.routing.policy import Route
from epd_serve.routing.table import InstanceRecord


class HeldKV(Struct, frozen=True):
    """Kept by ``record`` for a while, as that of the request which it knows by ``request_id``."""

    record: InstanceRecord
    request_id: str

    def route(self, other: Route) -> Route | None:
        """To the decode instance of a route on which the prompt would be computed again; None: there is none."""
        if other.decode is self.record:
            return None
        answer = other.prefill_work if other.fused else other.decode_work
        work = Work(num_sequences=answer.num_sequences, num_kv_tokens=answer.num_kv_tokens)
        return Route(prefill=self.record, decode=other.decode, decode_work=work)
