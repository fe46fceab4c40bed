"""The instance's side of its engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from epd_serve.engine.events import EngineEvent
from epd_serve.sched.language import ScheduleOutput


class EngineHooks(Protocol):
    """An engine's calls to the instance around it: features, pacing, and the events of its steps.

    All are called on the engine's thread unless they say otherwise, and none may block except ``feature`` and
    ``turn``. A class that derives from this one begins with no features, no pacing and no receiver of events.
    """

    def feature(self, mm_hash: str) -> Tensor | None:
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

    def died(self) -> None:
        """Called when nothing will ever be computed again."""

    def emit(self, events: list[EngineEvent]) -> None:
        """Take the events of one step."""

    def freed(self) -> None:
        """Called when blocks, or places in the queue for them, are free, on the thread that gave them back."""
