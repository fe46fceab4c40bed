"""Spans: what a process did, and from when to when. Stages write each once; whoever shows them subscribes.

Requests have their ids and their places in traces here, too, by W3C Trace Context: the headers ``traceparent`` and
``tracestate`` (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
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

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

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


def new_context(*, sampled: bool = False) -> TraceContext:
    """The beginning of a trace."""
    return TraceContext(random_block().hex(), random_block()[:8].hex(), sampled=sampled)


def parse_traceparent(parent: str | None, state: str | None = None) -> TraceContext | None:
    """The context of a caller; ``span_id`` is the caller's. None where the header is missing or invalid: then the
    specification has the receiver begin a trace of its own. A ``tracestate`` that cannot be passed on is dropped.
    """
    match = _PARENT.fullmatch(parent) if parent else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = state.strip() if state else ""
    if len(state) > _MAX_STATE or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1), state=state)


def join(parent: str | None, state: str | None = None, *, sampled: bool = False) -> TraceContext:
    """A context of one's own below the caller's; without a caller's, a new trace that is ``sampled`` or not."""
    caller = parse_traceparent(parent, state)
    if caller is None:
        return new_context(sampled=sampled)
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
