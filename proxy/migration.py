"""The KV of an answer whose decode instance leaves: where it lies, and by which route it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.backends.base import StageCall, StageCalls
from epd_serve.backends.native import NativeInstance
from epd_serve.cost.work import Work
from epd_serve.protocol.wire import MoveRequest
from epd_serve.routing.policy import Route
from epd_serve.routing.table import InstanceRecord


@dataclass(frozen=True)
class HeldKV:
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

    def move(
        self,
        calls: StageCalls,
        request_id: str,
        route: Route,
        decode_url: str,
        trace_id: str,
        *,
        num_generated: int | None,
    ) -> StageCall:
        """Have it moved along :meth:`route`; ``num_generated``: see MoveRequest."""
        assert isinstance(calls, NativeInstance), "no other keeps KV"
        request = MoveRequest(
            request_id=request_id,
            held_id=self.request_id,
            decode_url=decode_url,
            max_model_len=route.max_model_len,
            num_generated=num_generated,
        )
        return calls.move(request, trace_id=trace_id)
