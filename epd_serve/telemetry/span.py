"""Spans: what a process did, and from when to when. Stages write each once; whoever shows them subscribes.

Requests have their ids and their places in traces here, too, by W3C Trace Context: the headers ``traceparent`` and
``tracestate`` (https://www.w3.org/TR/trace-context/).

Each stage of a request on its critical path is a span (TriInfer section 5.5). The events between which each lies:

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

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

import msgspec

Value = str | int | float | bool


class Span(msgspec.Struct, eq=False):
    """One piece of work, in seconds of the process's monotonic clock.

    Attributes:
        name: of a request's stage, or of what a thread did.
        request_id: "" where the work was not one request's.
        end_s: infinite while it lasts.
        attributes: ``track`` names the thread of work that was not one request's, ``instance`` who did a stage as
            the gateway sees it, ``item`` is the mm_hash of an encode; others say what else there is to know.
    """

    name: str
    request_id: str
    start_s: float
    end_s: float = inf
    attributes: dict[str, Value] = {}

    def end(self, **attributes: Value) -> None:
        """End now, unless that was done before."""
        if self.end_s == inf:
            self.end_s = time.monotonic()
            self.attributes |= attributes


class SpanStream:
    """The spans of a process, each as soon as it is over. Any thread may put one; subscribers are called on it."""

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
        self._lock = threading.RLock()
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

    # ------------------------------------------------------------------ prefill and decode

    def received(self, request_id: str, stage: str, *, hand_off: bool = False) -> None:
        """Record that a request has come for a stage: what P or D begins with.

        Args:
            hand_off: whether P leaves its answer to D.
        """
        with self._lock:
            self.drop(request_id)
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
            self.drop(request_id)

    def finished(self, request_id: str) -> None:
        """Record the last token. Where it is the first as well, the decode took no time."""
        with self._lock:
            stay = self._stays.get(request_id)
            if stay is not None:
                is_decoded = stay.stage == DECODE_EXECUTE
                end = self._clock() if is_decoded else stay.since
                self._put(Span(DECODE_EXECUTE, request_id, stay.since, max(end, stay.since)))
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a request that is over. Idempotent."""
        with self._lock:
            stay = self._stays.pop(request_id, None)
            if stay is not None and stay.stage in (FEATURE_WAIT, PREFILL_QUEUE, PREFILL_EXECUTE, DECODE_QUEUE):
                self._num_queued -= 1

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


TRACEPARENT_HEADER, TRACESTATE_HEADER = "traceparent", "tracestate"

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: As long as all vendors must be able to pass on.
_MAX_STATE = 512
_STATE = re.compile(r"[\x20-\x7e\t]+")
_SPAN_IDS = (1 << 64) - 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A request's place in a trace.

    Attributes:
        trace_id: 32 hex digits.
        span_id: of the part of the work that is done here: 16 hex digits.
        parent_id: of the caller's span; "" where the trace begins here.
        sampled: whether spans are recorded.
        state: ``tracestate`` as it came, to be passed on; "" for none.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = False
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header with which others join in below :attr:`span_id`."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.sampled)}"

    def child(self, number: int) -> TraceContext:
        """The ``number``-th part of this span, from 1; equal numbers make equal ids."""
        span_id = (int(self.span_id, 16) + number) & _SPAN_IDS or 1
        return TraceContext(self.trace_id, f"{span_id:016x}", self.span_id, self.sampled, self.state)


def parse_traceparent(parent: str, state: str = "") -> TraceContext | None:
    """The context of a caller; ``span_id`` is the caller's. None where the header is invalid: then the
    specification has the receiver begin a trace of its own. A ``tracestate`` that cannot be passed on is dropped.
    """
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


def join(parent: str = "", state: str = "") -> TraceContext:
    """A context of one's own below the caller's; without a caller's, a new trace that is not sampled."""
    caller = parse_traceparent(parent, state) if parent else None
    if caller is None:
        return TraceContext(random_block().hex(), random_block()[:8].hex())
    return TraceContext(caller.trace_id, random_block()[:8].hex(), caller.span_id, caller.sampled, caller.state)


_SIZE = 16
_FETCHED_AT_ONCE = 512

#: Taking a block out is atomic, so that no two threads get the same one.
_blocks: deque[bytes] = deque()
os.register_at_fork(after_in_child=_blocks.clear)


def random_block() -> bytes:
    """16 random bytes, as good as those of ``os.urandom``, that nobody else has got."""
    try:
        return _blocks.pop()
    except IndexError:
        data = os.urandom(_SIZE * _FETCHED_AT_ONCE)
        _blocks.extend(data[at : at + _SIZE] for at in range(_SIZE, len(data), _SIZE))
        return data[:_SIZE]
