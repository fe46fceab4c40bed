"""NVIDIA GPUs: operators, graphs, partitions, and the reason if none is usable."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from device import base, cuda_ipc, mps
from device.accel import AcceleratorDevice
from device.base import DeviceUnavailable, Partition, PartitionStrength, check_share, check_update
from device.ops.cuda import CudaOps
from device.ops.varlen import varlen

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_FLASH_CAPABILITY = (8, 0)
_FAST_CUDNN_MAJORS = (9, 10)  # Hopper, and Blackwell in data centres
_WARM_UP_RUNS = 2


@dataclass(slots=True)
class _Piece:
    """A graph, and the call after each replay."""

    graph: torch.cuda.CUDAGraph
    then: Callable[[], None] | None = None


class CudaGraphRunner:
    """GraphRunner with one CUDA graph per size, or per piece of a step, all in one memory pool.

    Replays of one runner must not overlap each other, since the graphs share their working memory.
    """

    name = "CUDA graph"
    captures = cuts = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: dict[int, tuple[list[_Piece], Tensor]] = {}
        self._open: list[_Piece] | None = None  # pieces of the size being captured

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        with torch.cuda.device(self._device):
            # Lazy set-up (cuBLAS workspaces, autotuning) must happen before the capture, off the capturing stream.
            # A graph's kernels keep the priority of their capture: this thread's.
            current = torch.accelerator.current_stream()
            side = torch.Stream(self._device, priority=torch.cuda.current_stream().priority)
            side.wait_stream(current)
            with side:
                for _ in range(_WARM_UP_RUNS):
                    step()
            current.wait_stream(side)
            torch.cuda.synchronize()
            gc.collect()  # freeing memory during a capture breaks it
            torch.cuda.empty_cache()
            # Makes cuBLAS take its workspace from the pool: otherwise graphs of two streams could share one.
            torch._C._cuda_clearCublasWorkspaces()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            pieces: list[_Piece] = []
            self._open = pieces
            with side:
                self._begin()
                try:
                    output = step()
                finally:
                    pieces[-1].graph.capture_end()
                    self._open = None
                    torch._C._cuda_clearCublasWorkspaces()
        self._graphs[size] = pieces, output

    def _begin(self) -> None:
        assert self._open is not None
        self._open.append(_Piece(torch.cuda.CUDAGraph()))
        # thread_local: other threads of the instance may allocate or wait during the capture.
        self._open[-1].graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def cut(self, between: Callable[[], None]) -> None:
        if self._open is None:
            between()
            return
        self._open[-1].graph.capture_end()
        self._open[-1].then = between
        self._begin()

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        """Check the arguments only: a CUDA graph reads its lengths from the device."""
        check_update(size, decode_context_lens, self._graphs)

    def replay(self, size: int) -> Tensor:
        pieces, output = self._graphs[size]
        for piece in pieces:
            piece.graph.replay()
            if piece.then is not None:
                piece.then()
        return output


class CudaDevice(AcceleratorDevice):
    """One NVIDIA GPU, or one MIG slice of it."""

    def __init__(self, index: int) -> None:
        super().__init__("cuda", index, _partition(torch.cuda.get_device_name(index)))
        with torch.cuda.device(index):
            has_bfloat16 = torch.cuda.is_bf16_supported()
        self.dtypes = (torch.float32, torch.float16, *((torch.bfloat16,) if has_bfloat16 else ()))
        cores = torch.cuda.get_device_properties(index).multi_processor_count
        self.cores = cores
        self.ops: base.AttentionOps = make_ops(cores, torch.cuda.get_device_capability(index))
        self._green_contexts: list[object] = []

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
        return cuda_ipc.mapped_memory(handle, self.torch_device)

    def settle_arrivals(self) -> None:
        cuda_ipc.settle_arrivals(self.torch_device)

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """Limit this process to a share of the memory; MPS limited its multiprocessors at its start.

        MPS reads its share from the environment when the process opens the GPU: see ``device.mps``. Raises
        ValueError without MPS, because processes would then take turns at all multiprocessors.
        """
        check_share(share, start)
        percentage = os.environ.get(mps.SHARE)
        if percentage is None or not mps.is_running(os.environ):
            lack = f"{mps.SHARE} is not set" if mps.is_running(os.environ) else f"no {mps.CONTROL} runs"
            raise ValueError(
                f"share {share:g} of {self.name}: {lack}, so processes take turns at all of the GPU. "
                "'epd-serve up' starts MPS and sets it; for a single instance do so yourself, or split only the "
                "memory with memory_share"
            )
        applied = super().apply_share(share, start)
        return Partition(
            strength=applied.strength,
            mechanisms=(*applied.mechanisms, f"MPS, {percentage} % of the multiprocessors"),
        )

    def stream(self, priority: int = 0, share: float | None = None) -> base.Stream:
        """Return a stream; with a share, one of priority 0 in a green context of that many multiprocessors."""
        if share is None:
            return super().stream(priority)
        check_share(share, 0.0)
        self.activate()
        try:  # multiprocessors are split in groups of 2 to 8
            num_sms = max(1, round(share * (self.cores or 1)))
            context: Any = torch.cuda.green_contexts.GreenContext.create(num_sms=num_sms, device_id=self.index)
            stream = context.Stream()
        except RuntimeError as error:  # older driver, or torch built for CUDA before 12.8
            raise ValueError(
                f"{self.name} cannot create a green context of share {share:g} ({error}); remove tower_share"
            ) from error
        self._green_contexts.append(context)  # a stream needs its context alive
        return cast(base.Stream, stream)


def make_ops(cores: int, capability: tuple[int, int]) -> CudaOps:
    """Return the fastest operators for the installed packages and the GPU's compute capability.

    Raises DeviceUnavailable if Triton is installed but cannot compile.
    """
    flash = varlen if capability >= _FLASH_CAPABILITY else None
    has_fast_cudnn = capability[0] in _FAST_CUDNN_MAJORS
    if importlib.util.find_spec("triton") is None:
        return CudaOps(flash, has_fast_cudnn=has_fast_cudnn)
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        raise DeviceUnavailable("Triton needs a C compiler: install gcc or clang, or name one in CC")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise DeviceUnavailable("Triton needs Python's headers: install python3-dev, or the -devel image")
    # Imported here because importing it imports Triton.
    from device.ops.triton_ops import TritonOps

    return TritonOps(cores, flash, has_fast_cudnn=has_fast_cudnn)


def _partition(device_name: str) -> Partition:
    """Return the mechanisms, visible to this process, that can set shares of the GPU."""
    if "MIG" in device_name:
        return Partition(strength=PartitionStrength.ISOLATED, mechanisms=("MIG", "memory fraction"))
    mechanisms = ["memory fraction"]
    if mps.is_running(os.environ):
        mechanisms.append("MPS")
    return Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=tuple(mechanisms))


def missing() -> str | None:
    """Return why NVIDIA GPUs cannot be used here; None if at least one is usable."""
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
    """Open a GPU by its index. Raises DeviceUnavailable with the reason."""
    if (reason := missing()) is not None:
        raise DeviceUnavailable(f"cuda:{index}: {reason}")
    if index >= count():
        raise DeviceUnavailable(
            f"cuda:{index}: {count()} visible, cuda:0 to cuda:{count() - 1} ({VISIBLE_DEVICES})"
        )
    return CudaDevice(index)
