"""Encodes that wait for prompts, on an instance that has both (HydraInfer, Algorithm 1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from epd_serve.engine.engine import Engine
from epd_serve.instance.encode import Encoder
from epd_serve.sched.schedule import ScheduleOutput

_ASK_AGAIN_S = 0.01


class PrefillMarkingEngine(Engine):
    """Knows whether prompts are being computed."""

    is_prefilling = False

    def plan(self, in_flight: ScheduleOutput | None) -> ScheduleOutput:
        output = super().plan(in_flight)
        self.is_prefilling = bool(output.prefills or (in_flight and in_flight.prefills))
        return output


class EncodeGate:
    """Lets no new encode start while prompts are computed (HydraInfer, Algorithm 1), up to a time.

    Prompts that never end must not starve images, of which some of them may be waiting for.
    """

    def __init__(
        self, is_prefilling: Callable[[], bool], clock: Callable[[], float], *, patience_s: float = 1.0
    ) -> None:
        self._is_prefilling = is_prefilling
        self._clock = clock
        self._patience_s = patience_s
        self._held_since: float | None = None

    def may_start(self) -> bool:
        """Whether an encode that is waiting may start now; to be asked again soon where not."""
        now = self._clock()
        if self._is_prefilling():
            if self._held_since is None:
                self._held_since = now
            if now - self._held_since < self._patience_s:
                return False
        self._held_since = None
        return True


class WaitingEncoder(Encoder):
    """Starts no encode while prompts are computed, up to a time; asks again soon."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._gate = EncodeGate(self._is_prefilling, time.monotonic)

    def _is_prefilling(self) -> bool:
        engine = self.consumer and self.consumer.engine
        return isinstance(engine, PrefillMarkingEngine) and engine.is_prefilling

    def may_start(self) -> bool:
        if self._gate.may_start():
            return super().may_start()
        asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self.stream.reconsider)
        return False
