"""Spans: what a process did, and from when to when. Stages write each once; whoever shows them subscribes."""

from __future__ import annotations

import time
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
