"""What an engine tells of its requests, once after each step."""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.errors import ServeError
from epd_serve.request import FinishReason, Sequence
from epd_serve.worker.sampler import SampledToken


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence has a new token; with ``finish_reason`` it was the last one and its blocks are free again."""

    sequence: Sequence
    token: SampledToken
    finish_reason: FinishReason | None

    @property
    def request_id(self) -> str:
        return self.sequence.request_id


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A prompt that another instance goes on with: each choice's first token, and whether it was the last."""

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
