"""Captured decode steps on NPUs, whose attention takes its lengths from the host.

A captured attention call would keep the lengths of its capture. torch_npu's remedy: while it captures with
``auto_dispatch_capture``, each attention call becomes a task group with an event that the graph waits for, and
``NPUGraph.update`` issues the calls again with new keyword values on a stream of its own, recording the events.
That is torch_npu's own bookkeeping (torch_npu/npu/graphs.py), so the operators need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from device.base import check_update

_WARM_UP_RUNS = 2


@dataclass(slots=True)
class _Captured:
    graph: Any
    output: Tensor
    replayed: Any
    """Event after the last replay; None before the first."""
    is_bound: bool
    """Whether lengths were given since the last replay; without them the graph would wait forever."""


class NPUGraphRunner:
    """Fills the GraphRunner protocol with one NPU graph per size, all in one memory pool.

    Replays of one runner must not overlap each other, since the graphs share their working memory.
    """

    name = "NPU graph"
    captures = True

    def __init__(self, device: torch.device, lengths_argument: str) -> None:
        """``lengths_argument``: how the attention operator spells its context lengths."""
        self._device = device
        self._lengths_argument = lengths_argument
        self._npu: Any = torch.get_device_module("npu")
        self._captured: dict[int, _Captured] = {}

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        npu = self._npu
        with npu.device(self._device):
            current, side = npu.current_stream(), npu.Stream()
            side.wait_stream(current)
            with npu.stream(side):
                for _ in range(_WARM_UP_RUNS):
                    step()
            current.wait_stream(side)
            graph = npu.NPUGraph()
            pool = next((entry.graph.pool() for entry in self._captured.values()), None)
            with npu.graph(graph, pool=pool, auto_dispatch_capture=True):
                output = step()
        self._captured[size] = _Captured(graph, output, None, False)

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        check_update(size, decode_context_lens, self._captured)
        entry = self._captured[size]
        if entry.replayed is not None:
            # A replay clears the events as it passes them: it must not clear those that are recorded next.
            entry.replayed.synchronize()
        entry.graph.update(cpu_update_input=[{self._lengths_argument: list(decode_context_lens)}])
        entry.is_bound = True

    def replay(self, size: int) -> Tensor:
        entry = self._captured[size]
        assert entry.is_bound, "update binds the lengths of each replay"
        entry.graph.replay()
        entry.replayed = self._npu.current_stream().record_event()
        entry.is_bound = False
        return entry.output
