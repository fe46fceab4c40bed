"""Reduce busy waiting of vLLM's processes on a CPU whose cores several stages share.

vLLM's engine and workers exchange messages through shared memory; a waiting process spins for a second before it
sleeps.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

#: A sleeper checks again after this time, in case a wake-up was lost ...
_LOOK_MS = 2
#: ... if the last message is younger than this. Otherwise it sleeps as in vLLM.
_ACTIVE_S = 1.0


def spin_for(seconds: float) -> None:
    """Set the spin time of queues created later. Does nothing if this vLLM waits differently."""
    from vllm.distributed.device_communicators import shm_broadcast

    condition: Any = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None or issubclass(condition, _Sleeper):
        return
    takes = {*inspect.signature(condition).parameters, *inspect.signature(condition.wait).parameters}
    if not {"is_reader", "busy_loop_s", "timeout_ms"} <= takes:
        return
    shm_broadcast.SpinCondition = type("SleepingCondition", (_Sleeper, condition), {"spin_s": seconds})


class _Sleeper:
    """A mixin before vLLM's SpinCondition; uses its ``busy_loop_s``, ``last_read`` and ``wait``."""

    spin_s = 0.0
    busy_loop_s: float
    last_read: float

    def __init__(self, is_reader: bool, *arguments: Any, **named: Any) -> None:
        super().__init__(is_reader, *arguments, **named)  # type: ignore[call-arg]
        if is_reader:
            self.busy_loop_s = self.spin_s

    def wait(self, timeout_ms: int | None = None) -> None:
        if time.monotonic() - self.last_read < _ACTIVE_S:
            timeout_ms = _LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS)
        super().wait(timeout_ms)  # type: ignore[misc]
