"""NVIDIA GPUs: operators, graphs, partitions, and why there is none."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from device import base, cuda_ipc
from device.accel import AcceleratorDevice
from device.base import DeviceUnavailable, Partition, PartitionStrength, check_update
from device.ops.cuda import CudaOps
from device.ops.varlen import find_varlen
from device.shares import MPS_SHARE, mps_is_running

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_FLASH_CAPABILITY = (8, 0)
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
            # Other threads of the instance may allocate or wait meanwhile; only this one records.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
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
        super().__init__("cuda", index, _partition(torch.cuda.get_device_name(index)))
        self.ops: base.AttentionOps = make_ops(self.cores, torch.cuda.get_device_capability(index))

    @property
    def cores(self) -> int:
        return torch.cuda.get_device_properties(self.index).multi_processor_count

    def graph_runner(self) -> base.GraphRunner:
        return CudaGraphRunner(self.torch_device)

    def pin_in_place(self, memory: Tensor) -> Callable[[], None]:
        cudart, address = self._vendor.cudart(), memory.data_ptr()
        if (error := int(cudart.cudaHostRegister(address, memory.nbytes, 0))) != 0:
            logger.warning("%d MiB of host memory cannot be pinned (CUDA error %d)", memory.nbytes >> 20, error)
            return lambda: None
        return lambda: cudart.cudaHostUnregister(address)

    def share_memory(self, nbytes: int) -> tuple[Tensor, bytes]:
        self.activate()
        memory, _ = super().share_memory(nbytes)
        try:
            return memory, cuda_ipc.export_memory(memory)
        except ValueError as error:
            logger.info("%s: its memory is not shared with other processes: %s", self.name, error)
            return memory, b""

    def map_memory(self, handle: bytes) -> AbstractContextManager[Tensor]:
        self.activate()
        return cuda_ipc.mapped_memory(handle, self.torch_device)

    def settle_arrivals(self) -> None:
        self.activate()
        cuda_ipc.settle_arrivals()

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """A share of the memory, beside the share of the multiprocessors that MPS gave this process at its start.

        MPS reads that from the environment when the process opens the GPU: see ``device.shares``. Without MPS the
        processes take turns at the multiprocessors. Green contexts part the streams of one process, not processes.
        """
        applied = super().apply_share(share, start)
        percentage = os.environ.get(MPS_SHARE)
        if percentage is None or not mps_is_running():
            return applied
        return Partition(
            strength=applied.strength,
            mechanisms=(*applied.mechanisms, f"MPS, {percentage} % of the multiprocessors"),
        )


def make_ops(cores: int, capability: tuple[int, int]) -> CudaOps:
    """The fastest operators that the installed packages and a GPU of this compute capability allow.

    Raises DeviceUnavailable where Triton is installed and cannot compile.
    """
    varlen = find_varlen() if capability >= _FLASH_CAPABILITY else None
    if importlib.util.find_spec("triton") is None:
        return CudaOps(varlen)
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        raise DeviceUnavailable("Triton needs a C compiler: install gcc or clang, or name one in CC")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise DeviceUnavailable("Triton needs Python's headers: install python3-dev, or the -devel image")
    # Imported here because importing it imports Triton.
    from device.ops.triton_ops import TritonOps

    return TritonOps(cores, varlen)


def _partition(device_name: str) -> Partition:
    """The mechanisms that can set shares of this GPU and that this process can see."""
    if "MIG" in device_name:
        return Partition(strength=PartitionStrength.ISOLATED, mechanisms=("MIG", "memory fraction"))
    mechanisms = ["memory fraction"]
    if mps_is_running():
        mechanisms.append("MPS")
    return Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=tuple(mechanisms))


def missing() -> str | None:
    """Return the reason why NVIDIA GPUs cannot be used here; None where at least one is usable."""
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
    """Open a GPU by its index. Raises DeviceUnavailable with the reason where it cannot be used."""
    if (reason := missing()) is not None:
        raise DeviceUnavailable(f"cuda:{index}: {reason}")
    if index >= count():
        raise DeviceUnavailable(
            f"cuda:{index}: {count()} visible, cuda:0 to cuda:{count() - 1} ({VISIBLE_DEVICES})"
        )
    return CudaDevice(index)
