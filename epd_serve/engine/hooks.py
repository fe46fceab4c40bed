"""Events of an engine's requests, handed out once after each step, and the instance's side of its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from epd_serve.engine.computing import SampledToken
from epd_serve.errors import ServeError
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sequence import FinishReason, Sequence

logger = logging.getLogger(__name__)


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """A sequence has a new token; with ``finish_reason`` it was the last one and its blocks are free again.

    ``logprobs`` are the ones that were asked for of the tokens before it, by index
    (:attr:`Sequence.wanted_logprobs`).
    """

    sequence: Sequence
    token: SampledToken
    finish_reason: FinishReason | None
    logprobs: Mapping[int, TokenLogprob] = MappingProxyType({})

    @property
    def request_id(self) -> str:
        return self.sequence.request_id


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A prompt that continues on another instance: each choice's first token, and whether it was the last."""

    sequence: Sequence
    tokens: list[tuple[SampledToken, FinishReason | None]]

    @property
    def request_id(self) -> str:
        return self.sequence.request_id


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A step failed with this request in it; its blocks are free again."""

    request_id: str
    error: ServeError


EngineEvent = TokenEvent | PromptEvent | FailureEvent


class Listeners:
    """The receivers of events, by request id."""

    def __init__(self) -> None:
        self._feeds: dict[str, Callable[[EngineEvent], None]] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    def listen(self, request_id: str, feed: Callable[[EngineEvent], None] | None) -> None:
        """Send the request's events to ``feed`` from now on; None: to nobody any more."""
        if feed is None:
            self._feeds.pop(request_id, None)
        else:
            self._feeds[request_id] = feed

    def dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            feed = self._feeds.get(event.sequence.request_id if type(event) is TokenEvent else event.request_id)
            if feed is None:
                continue
            try:
                feed(event)
            except Exception as error:  # an answer that cannot be written must not take the others along
                logger.exception("the answer of request %s failed", event.request_id)
                feed(FailureEvent(event.request_id, ServeError(f"the answer cannot be written: {error}")))


class EngineHooks(Protocol):
    """An engine's calls to the instance around it: features, pacing, and the events of its steps.

    All are called on the engine's thread unless they say otherwise, and none may block except ``feature`` and
    ``turn``. A class that derives from this one begins with no features, no pacing and no receiver of events.
    """

    def feature(self, mm_hash: str) -> Any | None:
        """Encoder output [tokens, width] for a step that needs it now; may fetch it first. None: there is none."""
        return None

    def has_feature(self, mm_hash: str) -> bool:
        """Whether the feature is here or can be fetched, so that ``feature`` is worth calling."""
        return self.feature(mm_hash) is not None

    def feature_starved(self, mm_hash: str) -> None:
        """Called when a sequence could be computed if its feature were here."""

    def turn(self) -> AbstractContextManager[None]:
        """A context around the launch of each step; entering it waits for the step's turn on the device."""
        return nullcontext()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Called after a step with its seconds, less the part in which the device was at the step before."""

    def idle(self) -> None:
        """Called when nothing can be computed for now."""

    def failed(self) -> None:
        """Called when a step has failed, before its requests do; ends the process of a device that is lost."""

    def died(self) -> None:
        """Called when nothing will ever be computed again."""

    def emit(self, events: list[EngineEvent]) -> None:
        """Take the events of one step."""

    def freed(self) -> None:
        """Called when blocks, or places in the queue for them, are free, on the thread that gave them back."""
