"""Events of an engine's requests, handed out once after each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from epd_serve.engine.sampler import SampledToken
from epd_serve.errors import ServeError
from epd_serve.protocol.wire import TokenLogprob
from epd_serve.request import FinishReason, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence has a new token; with ``finish_reason`` it was the last one and its blocks are free again.

    ``logprobs`` are the ones that were asked for of the tokens before it, by index
    (:attr:`Sequence.wanted_logprobs`).
    """

    sequence: Sequence
    token: SampledToken
    finish_reason: FinishReason | None
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)

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

    def fail(self, request_id: str, error: ServeError) -> None:
        """Send the request's receiver a failure, as though a step had failed with the request in it."""
        self.dispatch([FailureEvent(request_id, error)])

    def dispatch(self, events: list[EngineEvent]) -> None:
        for event in events:
            feed = self._feeds.get(event.request_id)
            if feed is None:
                continue
            try:
                feed(event)
            except Exception as error:  # an answer that cannot be written must not take the others along
                logger.exception("the answer of request %s failed", event.request_id)
                feed(FailureEvent(event.request_id, ServeError(f"the answer cannot be written: {error}")))
