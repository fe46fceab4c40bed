"""The stage that a request is in, from event to event: the latency breakdown of TriInfer section 5.5.

The stages of a request on its critical path, and the events between which each lies:

================  =================================================================================================
encode_queue      E has read the encode call → the tower begins the batch with the item (decoding, resizing and
                  cutting into patches included; to the hit where the store has the feature)
encode_execute    → the batch is computed, its features on the host; absent after a hit
ep_migration      → P has confirmed that it has the feature (checksum and store included), on E's clock
prefill_queue     P has read the prefill call, or has the last of the features it lacked then → a step with the
                  prompt begins, or goes on (tokenising and the reservation at D included)
prefill_execute   → the prompt's first token is sampled, at the end of its last step
pd_migration      → D has confirmed the hand-over, on P's clock; absent where one instance does both
decode_queue      D has taken the request over (or the first token is there) → the first step with it begins
decode_execute    → the last token is turned into text; 0 where the first token was the last
================  =================================================================================================

Meanwhile P is in ``feature_wait``, from the prefill call to the last feature that it lacked: the encode stages and
the migration as P sees them, so it is no part of the sum. What P computes of the prompt in that time (text before
an image, other images) is hidden behind the encoding, and counts as waiting.

An item belongs to the critical path where its feature is the last that came. Each instance measures on its own
clock; the two migrations therefore last until the sender has the answer, half a round trip longer than the way
itself. :mod:`epd_serve.telemetry.breakdown` joins the records of several processes without that overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epd_serve.telemetry.span import Span, Value

ENCODE_QUEUE, ENCODE_EXECUTE, EP_MIGRATION = "encode_queue", "encode_execute", "ep_migration"
PREFILL_QUEUE, PREFILL_EXECUTE, PD_MIGRATION = "prefill_queue", "prefill_execute", "pd_migration"
DECODE_QUEUE, DECODE_EXECUTE = "decode_queue", "decode_execute"
FEATURE_WAIT = "feature_wait"
#: Spans of the gateway: until the stage calls are sent, then until the answer is complete.
GATEWAY_RECEIVE, GATEWAY_SERVE = "gateway_receive", "gateway_serve"
#: In a request's order.
STAGES = (
    ENCODE_QUEUE,
    ENCODE_EXECUTE,
    EP_MIGRATION,
    PREFILL_QUEUE,
    PREFILL_EXECUTE,
    PD_MIGRATION,
    DECODE_QUEUE,
    DECODE_EXECUTE,
)


@dataclass(slots=True)
class _Stay:
    stage: str
    since: float
    hand_off: bool = False


class Timeline:
    """Turns the events of one instance into spans. Any thread may call it; times never run backwards.

    A request that fails or is cancelled is dropped: its open stage is not recorded.
    """

    def __init__(self, clock: Callable[[], float], put: Callable[[Span], None]) -> None:
        self._clock = clock
        self._put = put
        self._lock = threading.Lock()
        self._stays: dict[str, _Stay] = {}
        self._num_queued = 0

    @property
    def num_requests(self) -> int:
        return len(self._stays)

    # ------------------------------------------------------------------ encode

    def encoded(self, request_id: str, item: str, received_s: float, batch_s: tuple[float, float]) -> None:
        """Record an item's stages; the consumer has confirmed the item now.

        Args:
            item: its mm_hash.
            batch_s: begin and end of its batch; after a hit in the store, twice the time of the hit.
        """
        # a batch that was begun for another request may have started before this one came
        start, end = (max(at, received_s) for at in batch_s)
        about: dict[str, Value] = {"item": item}
        self._put(Span(ENCODE_QUEUE, request_id, received_s, start, about))
        if batch_s[0] < batch_s[1]:
            self._put(Span(ENCODE_EXECUTE, request_id, start, end, about))
        self._put(Span(EP_MIGRATION, request_id, end, self._clock(), about))

    # ------------------------------------------------------------------ prefill

    def prefill_received(self, request_id: str, *, hand_off: bool, lacks_features: bool) -> None:
        with self._lock:
            self._forget(request_id)
            stage = FEATURE_WAIT if lacks_features else PREFILL_QUEUE
            self._stays[request_id] = _Stay(stage, self._clock(), hand_off)
            self._num_queued += 1

    def features_here(self, request_id: str) -> None:
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None and stay.stage == FEATURE_WAIT:
                self._move(request_id, stay, PREFILL_QUEUE, self._clock())

    def handed_over(self, request_id: str) -> None:
        """Record the hand-over, which the decode instance has confirmed now."""
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None and stay.stage == PD_MIGRATION:
                self._put(Span(PD_MIGRATION, request_id, stay.since, self._clock()))
            self._forget(request_id)

    # ------------------------------------------------------------------ decode

    def decode_received(self, request_id: str) -> None:
        with self._lock:
            self._forget(request_id)
            self._stays[request_id] = _Stay(DECODE_QUEUE, self._clock())
            self._num_queued += 1

    def finished(self, request_id: str) -> None:
        """Record the last token. Where it is the first as well, the decode took no time."""
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None:
                is_decoded = stay.stage == DECODE_EXECUTE
                end = self._clock() if is_decoded else stay.since
                self._put(Span(DECODE_EXECUTE, request_id, stay.since, max(end, stay.since)))
            self._forget(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request that is over. Idempotent."""
        with self._lock:
            self._forget(request_id)

    # ------------------------------------------------------------------ steps

    def stepped(
        self, prefills: Iterable[tuple[str, bool]], decodes: Iterable[str], start_s: float, end_s: float
    ) -> None:
        """Record a step of the language model.

        Args:
            prefills: (request, whether its prompt is now computed).
            decodes: requests.
        """
        if not self._num_queued:
            return
        with self._lock:
            for request_id, is_complete in prefills:
                stay = self._stays.get(request_id)
                if stay is None:
                    continue
                if is_complete and stay.stage == FEATURE_WAIT:  # the engine saw the feature before we were told
                    self._move(request_id, stay, PREFILL_QUEUE, start_s)
                if stay.stage == PREFILL_QUEUE:
                    self._move(request_id, stay, PREFILL_EXECUTE, start_s)
                if is_complete and stay.stage == PREFILL_EXECUTE:
                    self._move(request_id, stay, PD_MIGRATION if stay.hand_off else DECODE_QUEUE, end_s)
                    self._num_queued -= stay.hand_off
            for request_id in decodes:
                stay = self._stays.get(request_id)
                if stay is not None and stay.stage == DECODE_QUEUE:
                    self._move(request_id, stay, DECODE_EXECUTE, start_s)
                    self._num_queued -= 1

    def _move(self, request_id: str, stay: _Stay, stage: str, at: float) -> None:
        at = max(at, stay.since)
        self._put(Span(stay.stage, request_id, stay.since, at))
        stay.stage, stay.since = stage, at

    def _forget(self, request_id: str) -> None:
        stay = self._stays.pop(request_id, None)
        if stay is not None and stay.stage in (FEATURE_WAIT, PREFILL_QUEUE, PREFILL_EXECUTE, DECODE_QUEUE):
            self._num_queued -= 1
