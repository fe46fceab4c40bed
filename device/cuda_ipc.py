"""Share GPU memory between processes of one host by CUDA IPC, through the driver's calls.

torch's sharing counts users in a file and leaks exported memory without an importer. Here the importer opens and
closes explicitly, one handle serves any number of processes, and the owner waits for them before it frees.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LAZY_PEER_ACCESS = 1
# CUflushGPUDirectRDMAWritesTarget and -Scope
_CURRENT_CONTEXT = 0
_TO_OWNER = 100
_OUR_PART = struct.Struct("<qq")  # offset in the driver's allocation, bytes


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


def export_memory(memory: Tensor) -> bytes:
    """Return a handle of contiguous GPU memory. Raises ValueError if the driver cannot share it.

    It cannot share memory of torch's expandable segments.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    address = memory.data_ptr()
    with _current(memory.device):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle) + _OUR_PART.pack(address - base.value, memory.nbytes)


@contextmanager
def mapped_memory(handle: bytes, device: torch.device) -> Iterator[Tensor]:
    """Map the memory [nbytes] uint8 behind another process's handle, on ``device`` or a peer GPU.

    Any thread may open and close it. Raises ValueError if it cannot be mapped: the owner is gone, or is this
    process, or the GPUs cannot reach each other.
    """
    if len(handle) != ctypes.sizeof(_IpcHandle) + _OUR_PART.size:
        raise ValueError(f"{len(handle)} bytes are not a handle of GPU memory")
    offset, nbytes = _OUR_PART.unpack(handle[-_OUR_PART.size :])
    opened, address = _IpcHandle.from_buffer_copy(handle), ctypes.c_uint64()
    with _current(device):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
    try:
        storage: Any = torch._C._construct_storage_from_data_pointer(address.value + offset, device, nbytes)
        yield torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    finally:
        with _current(device):
            _call("cuIpcCloseMemHandle", address)


def settle_arrivals(device: torch.device) -> None:
    """Flush GPUDirect RDMA writes, so that the GPU sees them. Raises ValueError.

    The driver does nothing on platforms that keep the order.
    """
    with _current(device):
        _call("cuFlushGPUDirectRDMAWrites", ctypes.c_uint(_CURRENT_CONTEXT), ctypes.c_uint(_TO_OWNER))


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make the device's context current. torch's own call does nothing on a new thread for GPU 0."""
    context = _primary_context(device.index or 0)
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """Return the primary context, shared with torch and held until the process ends."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    return context


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call the driver. Raises ValueError with its error text."""
    driver = _driver()
    if (error := getattr(driver, name)(*arguments)) == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(error, ctypes.byref(text))
    raise ValueError(f"{name}: {(text.value or b'').decode() or f'CUDA error {error}'}")
