"""Whether an instance computes: what an answer on its control port alone does not show."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import count

import torch

from epd_serve.engine.engine import Engine
from epd_serve.engine.hooks import EngineEvent, FailureEvent
from epd_serve.errors import WEDGED, ServeError
from epd_serve.request import Sequence, SequenceState
from epd_serve.types import SamplingParams

_LOOK_AGAIN_S = 0.05
#: An engine with work of its own shows within so long that it steps; only an idle one is given a token to compute.
_BUSY_S = 0.25
_SAMPLING = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


class EngineProbe:
    """Sees the engine step: through its own work where there is some, else by a prompt of one token.

    Args:
        listen: directs a request's engine events to a function; None ends that.
    """

    def __init__(
        self,
        engine: Engine,
        num_position_axes: int,
        listen: Callable[[str, Callable[[EngineEvent], None] | None], None],
    ) -> None:
        self._engine = engine
        self._num_position_axes = num_position_axes
        self._listen = listen
        self._numbers = count()

    async def check(self, timeout_s: float) -> None:
        """Raises ServeError with code ``wedged`` where nothing was computed in that time, or a step failed."""
        engine, loop = self._engine, asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        before = engine.num_steps
        if engine.load().num_running and await self._steps(before, min(loop.time() + _BUSY_S, deadline)):
            return
        failures: list[ServeError] = []

        def feed(event: EngineEvent) -> None:
            if isinstance(event, FailureEvent):
                failures.append(event.error)

        name = f"probe-{next(self._numbers)}"
        sequence = Sequence(
            request_id=name,
            prompt_ids=[0],
            sampling=_SAMPLING,
            max_tokens=1,
            positions=torch.zeros(self._num_position_axes, 1, dtype=torch.long),
            arrival_s=-math.inf,  # before all that wait for more blocks than there are
        )
        self._listen(name, feed)
        engine.submit(sequence)
        try:
            if not await self._steps(before, deadline, failures) and not self._has_no_room(sequence):
                raise ServeError(f"the engine made no step in {timeout_s:g} s", code=WEDGED)
            if failures:
                raise ServeError(f"the engine cannot compute: {failures[0].message}", code=WEDGED)
        finally:
            engine.abort(name)
            self._listen(name, None)

    async def _steps(self, before: int, deadline: float, failures: list[ServeError] | None = None) -> bool:
        """Whether there was a step, or a failed one, before the deadline."""
        loop = asyncio.get_running_loop()
        while self._engine.num_steps == before and not failures:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return True

    def _has_no_room(self, sequence: Sequence) -> bool:
        """All blocks are another's, who waits for something itself: that is no fault of the engine."""
        return sequence.state is SequenceState.WAITING and self._engine.load().free_blocks < 2
