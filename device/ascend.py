"""Ascend NPUs through torch_npu: discovery, shares, fused operators and captured graphs.

This file has never run on an NPU. tests/ascend/ladder.py lists the checks made without one.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from device import base
from device.accel import AcceleratorDevice
from device.ascend_environment import parse_visible_devices
from device.base import DeviceUnavailable, Partition, PartitionStrength, check_share, check_update
from device.ops.ascend import AscendOps, Layout

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
ATTENTION_LAYOUT = "EPD_ASCEND_ATTENTION_LAYOUT"
"""Set to BSND if an NPU refuses the default, TND; see :class:`device.ops.ascend.AscendOps`."""
#: torch_npu's names of chips without the operators: those before Atlas A2, and the small ones.
_WITHOUT_OPERATORS = re.compile(r"Ascend(310.*|910(A|B|(Pro|Premium).*))", re.IGNORECASE)
_PARTITION = Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=("memory fraction", "device limit"))


class AscendDevice(AcceleratorDevice):
    """One NPU."""

    # The only dtype documented for TND, the layout that the towers need.
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    def __init__(self, index: int) -> None:
        super().__init__("npu", index, _PARTITION)
        self.ops: base.AttentionOps = AscendOps(layout=attention_layout())
        self._has_share = False
        # the cores for matrix products; vector cores not counted
        self.cores = int(self._vendor.get_device_properties(index).cube_core_num)

    def memory(self) -> tuple[int, int]:
        self.activate()  # torch_npu's other calls set the thread's context themselves
        return super().memory()

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """Limit this process to a share of the memory, the cube cores and the vector cores.

        The runtime chooses the cores, so ``start`` is ignored. torch_npu sets the device limit once in a process:
        ValueError at the second call.
        """
        check_share(share, start)
        if self._has_share:
            raise ValueError(f"{self.name} has its share already: torch_npu sets it once; start another process")
        self.set_memory_fraction(share)
        cube, vector = self._share_of(self._vendor.get_device_limit(self.index), share)
        self._vendor.set_device_limit(self.index, cube, vector)
        self._has_share = True
        return Partition(
            strength=PartitionStrength.COOPERATIVE,
            mechanisms=(f"memory fraction {share:g}", f"{cube} cube cores", f"{vector} vector cores"),
        )

    @staticmethod
    def _share_of(limits: dict[str, int], share: float) -> tuple[int, int]:
        """Return cube and vector cores in the chip's ratio, which its operators require; at least one unit."""
        cube, vector = limits["cube_core_num"], limits["vector_core_num"]
        parts = math.gcd(cube, vector)
        count = max(1, round(share * parts))
        return count * cube // parts, count * vector // parts

    def set_memory_fraction(self, fraction: float) -> None:
        super().set_memory_fraction(float(fraction))  # torch_npu refuses the integer 1

    def graph_runner(self) -> base.GraphRunner:
        return NPUGraphRunner(self.torch_device)


def attention_layout() -> Layout:
    """Return the layout of the paged calls from the environment. Raises ValueError for an unknown layout."""
    layout = os.environ.get(ATTENTION_LAYOUT, "TND")
    if layout not in ("TND", "BSND"):
        raise ValueError(f"{ATTENTION_LAYOUT}={layout!r}: use TND (the default) or BSND")
    return cast(Layout, layout)


def missing() -> str | None:
    """Return why NPUs cannot be used here, with the remedy; None if at least one is usable."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; run in epd-serve's clone: pip install '.[ascend]'"
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible:
        try:
            parse_visible_devices(visible)
        except ValueError as error:
            return str(error)
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error}): source CANN's set_env.sh first"
    if count() == 0:
        return f"no NPU is visible ({VISIBLE_DEVICES}={visible or ''!r}); see npu-smi info"
    return None


def count() -> int:
    """Return the number of NPUs visible to this process; requires torch_npu to be loaded."""
    return int(torch.get_device_module("npu").device_count())


def open_device(index: int) -> AscendDevice:
    """Open an NPU by its index. Raises DeviceUnavailable with the reason."""
    if (reason := missing()) is not None:
        raise DeviceUnavailable(f"npu:{index}: {reason}")
    if index >= count():
        raise DeviceUnavailable(f"npu:{index}: {count()} visible, npu:0 to npu:{count() - 1} ({VISIBLE_DEVICES})")
    chip = str(torch.get_device_module("npu").get_device_name(index))
    if _WITHOUT_OPERATORS.fullmatch(chip):
        raise DeviceUnavailable(
            f"npu:{index}: {chip} lacks paged attention, which needs Atlas A2 or A3 (Ascend910B1, "
            "Ascend910_9391, ...)"
        )
    return AscendDevice(index)


_WARM_UP_RUNS = 2


@dataclass(slots=True)
class _Captured:
    graph: Any
    output: Tensor
    replayed: Any
    """Event after the last replay; None before the first."""
    is_bound: bool
    """True once lengths are bound for the next replay; without them the graph would wait forever."""


class NPUGraphRunner(base.GraphRunner):
    """One NPU graph per size, all in one memory pool.

    A captured attention call takes its lengths from the host and would keep the captured values. torch_npu's
    remedy: under ``auto_dispatch_capture`` each attention call becomes a task group with an event that the graph
    waits for, and ``NPUGraph.update`` reissues the calls with new keyword values on a stream of its own and
    records the events. torch_npu does this bookkeeping (torch_npu/npu/graphs.py); the operators are unaware of it.

    Replays of one runner must not overlap each other, since the graphs share their working memory.
    """

    name = "NPU graph"
    captures = True
    cuts = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
            # A replay clears the events that it passes; wait for its end before recording the next ones.
            entry.replayed.synchronize()
        entry.graph.update(cpu_update_input=[{"actual_seq_kvlen": list(decode_context_lens)}])
        entry.is_bound = True

    def replay(self, size: int) -> Tensor:
        entry = self._captured[size]
        assert entry.is_bound, "update binds the lengths of each replay"
        entry.graph.replay()
        entry.replayed = self._npu.current_stream().record_event()
        entry.is_bound = False
        return entry.output
