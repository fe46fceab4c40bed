"""Spans of work with their times, written once by stages and read by metrics and traces.

Each stage of a request on its critical path is a span (TriInfer section 5.5), between these events:

================  =================================================================================================
encode_queue      E has read the encode call → the tower begins the item's batch (decoding, resizing and patching
                  included), or the store has a hit
encode_execute    → the batch is computed and its features are on the host; absent after a hit
ep_migration      → P has confirmed the feature (checksum and store included), on E's clock
prefill_queue     P has read the prefill call and received its last missing feature → a step with the prompt begins
                  or continues (tokenising and the reservation at D included)
prefill_execute   → the first token is sampled, at the end of the prompt's last step
pd_migration      → D has confirmed the hand-over, on P's clock; absent if one instance does both
decode_queue      D has taken the request over, or the first token is sampled → its first step begins
decode_execute    → the last token is turned into text; 0 if the first token was the last
================  =================================================================================================

``feature_wait`` at P lasts from the prefill call to the last missing feature. It overlaps the encode stages and
the migration and is not part of the sum; P's work on the prompt in that time counts as waiting.

The item whose feature arrives last is on the critical path. Each instance measures on its own clock; a migration
lasts until its sender has the answer, half a round trip longer than the transfer.
:mod:`epd_serve.telemetry.breakdown` joins the spans of several processes without that overlap.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

import msgspec

Value = str | int | float | bool


class Span(msgspec.Struct, eq=False):
    """Work with its start and end, in seconds of the process's monotonic clock.

    Attributes:
        name: a request's stage or a thread's work.
        request_id: "" for work of several requests.
        end_s: infinite until it ends.
        attributes: ``track`` is the thread of work without a request, ``instance`` the instance of a stage in the
            gateway's spans, ``item`` the mm_hash of an encode.
    """

    name: str
    request_id: str
    start_s: float
    end_s: float = inf
    attributes: dict[str, Value] = {}

    def end(self, **attributes: Value) -> None:
        """End now. Idempotent."""
        if self.end_s == inf:
            self.end_s = time.monotonic()
            self.attributes |= attributes


class SpanStream:
    """Passes the finished spans of a process to its subscribers, on the thread that puts them."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Span], None]] = []

    def subscribe(self, subscriber: Callable[[Span], None]) -> None:
        self._subscribers.append(subscriber)

    def put(self, span: Span) -> None:
        for subscriber in self._subscribers:
            subscriber(span)


ENCODE_QUEUE, ENCODE_EXECUTE, EP_MIGRATION = "encode_queue", "encode_execute", "ep_migration"
PREFILL_QUEUE, PREFILL_EXECUTE, PD_MIGRATION = "prefill_queue", "prefill_execute", "pd_migration"
DECODE_QUEUE, DECODE_EXECUTE = "decode_queue", "decode_execute"
FEATURE_WAIT = "feature_wait"
#: Spans of the gateway: until it has sent the stage calls, then until the answer is complete.
GATEWAY_RECEIVE, GATEWAY_SERVE = "gateway_receive", "gateway_serve"
#: In the order of a request.
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
    """Turns an instance's events into spans. Any thread may call it; times never run backwards.

    The open stage of a failed or cancelled request is not recorded.
    """

    def __init__(self, clock: Callable[[], float], put: Callable[[Span], None]) -> None:
        self._clock = clock
        self._put = put
        self._lock = threading.RLock()
        self._stays: dict[str, _Stay] = {}
        self._num_queued = 0

    @property
    def num_requests(self) -> int:
        return len(self._stays)

    # ------------------------------------------------------------------ encode

    def record_encode(self, request_id: str, item: str, received_s: float, batch_s: tuple[float, float]) -> None:
        """Record the encode stages of an item.

        Args:
            item: its mm_hash.
            batch_s: start and end of its batch, equal after a hit in the store.
        """
        # the batch may have started for another request, before this one arrived
        start, end = (max(at, received_s) for at in batch_s)
        self._put(Span(ENCODE_QUEUE, request_id, received_s, start, {"item": item}))
        if batch_s[0] < batch_s[1]:
            self._put(Span(ENCODE_EXECUTE, request_id, start, end, {"item": item}))

    def record_fetch(self, request_id: str, item: str, encoded_s: float) -> None:
        """Record P's confirmation of the item."""
        self._put(Span(EP_MIGRATION, request_id, encoded_s, self._clock(), {"item": item}))

    # ------------------------------------------------------------------ prefill and decode

    def record_arrival(self, request_id: str, stage: str, *, hand_off: bool = False) -> None:
        """Record the arrival of a request at P or D.

        Args:
            hand_off: whether D continues P's answer.
        """
        with self._lock:
            self.drop(request_id)
            self._stays[request_id] = _Stay(stage, self._clock(), hand_off)
            self._num_queued += 1

    def record_features(self, request_id: str) -> None:
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None and stay.stage == FEATURE_WAIT:
                self._move(request_id, stay, PREFILL_QUEUE, self._clock())

    def record_hand_over(self, request_id: str) -> None:
        """Record D's confirmation of the hand-over."""
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None and stay.stage == PD_MIGRATION:
                self._put(Span(PD_MIGRATION, request_id, stay.since, self._clock()))
            self.drop(request_id)

    def record_end(self, request_id: str) -> None:
        """Record the last token; the decode takes no time if it is also the first."""
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None:
                is_decoded = stay.stage == DECODE_EXECUTE
                end = self._clock() if is_decoded else stay.since
                self._put(Span(DECODE_EXECUTE, request_id, stay.since, max(end, stay.since)))
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request. Idempotent."""
        with self._lock:
            stay = self._stays.pop(request_id, None)
            if stay is not None and stay.stage in (FEATURE_WAIT, PREFILL_QUEUE, PREFILL_EXECUTE, DECODE_QUEUE):
                self._num_queued -= 1

    # ------------------------------------------------------------------ steps

    def record_step(
        self, prefills: Iterable[tuple[str, bool]], decodes: Iterable[str], start_s: float, end_s: float
    ) -> None:
        """Record a step of the language model.

        Args:
            prefills: (request id, whether its prompt is now computed).
            decodes: request ids.
        """
        if not self._num_queued:
            return
        with self._lock:
            for request_id, is_complete in prefills:
                stay = self._stays.get(request_id)
                if stay is None:
                    continue
                if is_complete and stay.stage == FEATURE_WAIT:  # record_features() has not been called yet
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


TRACEPARENT_HEADER, TRACESTATE_HEADER = "traceparent", "tracestate"

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: The length that all vendors must propagate.
_MAX_STATE = 512
_STATE = re.compile(r"[\x20-\x7e\t]+")
_SPAN_IDS = (1 << 64) - 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """The place of a request in a trace, by W3C Trace Context (https://www.w3.org/TR/trace-context/).

    Attributes:
        trace_id: 32 hex digits.
        span_id: 16 hex digits, of this process's span.
        parent_id: the caller's span; "" if the trace begins here.
        sampled: whether spans are recorded.
        state: the received ``tracestate``.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = False
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header for calls from :attr:`span_id`."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.sampled)}"

    def child(self, number: int) -> TraceContext:
        """Return the ``number``-th child span, from 1; equal numbers give equal ids."""
        span_id = (int(self.span_id, 16) + number) & _SPAN_IDS or 1
        return TraceContext(self.trace_id, f"{span_id:016x}", self.span_id, self.sampled, self.state)


def parse_traceparent(parent: str, state: str = "") -> TraceContext | None:
    """Return the caller's context, or None for an invalid header. Drops an invalid ``tracestate``."""
    match = _PARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = state.strip()
    if len(state) > _MAX_STATE or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1), state=state)


def join_trace(parent: str = "", state: str = "") -> TraceContext:
    """Return a child of the caller's context, or a new unsampled trace without a valid one."""
    span_id = os.urandom(8).hex()
    caller = parse_traceparent(parent, state) if parent else None
    if caller is None:
        return TraceContext(os.urandom(16).hex(), span_id)
    return TraceContext(caller.trace_id, span_id, caller.span_id, caller.sampled, caller.state)
