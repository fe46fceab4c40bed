"""NVIDIA GPUs: graphs, partitions, and why there is none.

Nothing in this file has run on a GPU yet; its tests skip, visibly, where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from device import base
from device.accel import AcceleratorDevice
from device.base import DeviceUnavailable, Partition, PartitionStrength
from device.graphs import check_update

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_WARM_UP_RUNS = 2


class CudaGraphRunner:
    """Fills the GraphRunner protocol with one CUDA graph per size, all in one memory pool.

    Replays of one runner must not overlap each other, since the graphs share their working memory.
    """

    name = "CUDA graph"
    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        with torch.cuda.device(self._device):
            # Lazy set-up (cuBLAS workspaces, autotuning) must happen before the capture, off the capturing stream.
            current, side = torch.accelerator.current_stream(), torch.Stream(self._device)
            side.wait_stream(current)
            with side:
                for _ in range(_WARM_UP_RUNS):
                    step()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next((graph.pool() for graph, _ in self._graphs.values()), None)
            with torch.cuda.graph(graph, pool=pool):
                output = step()
        self._graphs[size] = (graph, output)

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        """A CUDA graph reads the lengths on the device: there is nothing to bind."""
        check_update(size, decode_context_lens, self._graphs)

    def replay(self, size: int) -> Tensor:
        graph, output = self._graphs[size]
        graph.replay()
        return output


class CudaDevice(AcceleratorDevice):
    """One NVIDIA GPU, or one MIG slice of it."""

    def __init__(self, index: int) -> None:
        super().__init__("cuda", index, VISIBLE_DEVICES, _partition(torch.cuda.get_device_name(index)))

    @property
    def cores(self) -> int:
        return torch.cuda.get_device_properties(self.index).multi_processor_count

    def graph_runner(self) -> base.GraphRunner:
        return CudaGraphRunner(self.torch_device)


def _partition(device_name: str) -> Partition:
    """What can set shares of this GPU, as far as this process can see."""
    if "MIG" in device_name:
        return Partition(strength=PartitionStrength.ISOLATED, mechanisms=("MIG", "memory fraction"))
    mechanisms = ["memory fraction"]
    if Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).is_dir():
        mechanisms.append("MPS")
    if importlib.util.find_spec("torch.cuda.green_contexts") is not None:
        mechanisms.append("green contexts")
    return Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=tuple(mechanisms))


def missing() -> str | None:
    """What keeps NVIDIA GPUs from being used here; None where at least one is usable."""
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if torch.version.cuda is None:
        driver = "" if has_driver else ", and no NVIDIA driver is loaded"
        return f"torch {torch.__version__} is built without CUDA{driver}: install a CUDA build (pytorch.org)"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if not has_driver:
        return "no NVIDIA driver is loaded"
    if caught:
        return str(caught[-1].message).splitlines()[0]
    return f"no GPU is visible ({VISIBLE_DEVICES}={os.environ.get(VISIBLE_DEVICES, '')!r})"


def count() -> int:
    return torch.cuda.device_count()


def open_device(index: int) -> CudaDevice:
    """Raises DeviceUnavailable with what is missing."""
    if (reason := missing()) is not None:
        raise DeviceUnavailable(f"cuda:{index}: {reason}")
    if index >= count():
        raise DeviceUnavailable(
            f"cuda:{index}: {count()} visible, cuda:0 to cuda:{count() - 1} ({VISIBLE_DEVICES})"
        )
    return CudaDevice(index)
