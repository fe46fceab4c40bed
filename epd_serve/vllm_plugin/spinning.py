"""The waiting of vLLM's processes on a CPU: where stages share the cores of a host, it takes from the others.

vLLM's engine and its workers exchange messages through shared memory, and whoever waits for one spins for a second
before it sleeps. A worker makes a dozen process groups, and the thread of each of them wakes up a hundred times a
second.
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


def share_threads() -> None:
    """Have groups of a single process, which have nothing to exchange, share one thread. Does nothing where torch
    has another way to make them."""
    from torch.distributed import distributed_c10d

    group: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if not hasattr(group, "create_default_device") or not hasattr(getattr(group, "_Options", None), "_devices"):
        return
    make: Any = group.__init__
    devices: list[Any] = []

    def make_one(self: Any, store: Any, rank: int, size: int, *options: Any, **named: Any) -> None:
        if size == 1 and not options and set(named) == {"timeout"}:
            if not devices:
                devices.append(group.create_default_device())
            shared = group._Options()
            shared._devices, shared._timeout = devices, named["timeout"]
            make(self, store, rank, size, shared)
        else:
            make(self, store, rank, size, *options, **named)

    group.__init__ = make_one


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
