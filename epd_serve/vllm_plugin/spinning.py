"""How vLLM's processes wait for each other's messages on a CPU.

vLLM's engine and its workers exchange messages through shared memory, and whoever waits for one spins for a second
before it sleeps. Where stages share the cores of a host, that second is taken from the others.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

#: A sleeper looks again after so long, for a wake-up that was lost ...
_LOOK_MS = 2
#: ... while the last message is no older than this. Then it sleeps as vLLM has it sleep.
_ACTIVE_S = 1.0


def spin_for(seconds: float) -> None:
    """Have queues that are made from now on spin for so long. Does nothing where vLLM has another way to wait."""
    from vllm.distributed.device_communicators import shm_broadcast

    condition: Any = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None or issubclass(condition, _Sleeper):
        return
    takes = {*inspect.signature(condition).parameters, *inspect.signature(condition.wait).parameters}
    if not {"is_reader", "busy_loop_s", "timeout_ms"} <= takes:
        return
    shm_broadcast.SpinCondition = type("SleepingCondition", (_Sleeper, condition), {"spin_s": seconds})


class _Sleeper:
    """Goes before vLLM's SpinCondition, of which it uses ``busy_loop_s``, ``last_read`` and ``wait``."""

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
