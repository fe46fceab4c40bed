"""Packed weights that the processes of one host keep once between them.

They inherit a file for each part of a model (``device.weight_files``). The first process that packs the part does
so into the file, under a lock; the others map what they find there, and so does one that is started again. Linux
gives shared memory small pages unless told otherwise (``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` set to
``advise``), from which a decode step of one sequence reads a tenth more slowly than from memory of its own. So a
part may be kept in the file for those that need it soon, and copied by those that read it for long.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from device import weight_files

_HEADER_BYTES = 1 << 23
_ALIGNMENT = 1 << 12
_MKLDNN_LAYOUT = 3

_current: ContextVar[SharedWeights | None] = ContextVar("shared weights", default=None)
#: Mappings and copies under tensors: weights stay for as long as the process.
_kept: list[object] = []


@contextmanager
def shared_weights(part: str, key: str, *, at_once: bool = False) -> Iterator[None]:
    """Share the weights packed inside the block with other processes, if this one inherited a file for the part.

    Args:
        key: names everything that decides the packed bytes; nothing is shared with a file that has another key.
        at_once: use the file's bytes in place, even where the part is marked to be copied.
    """
    files = weight_files.inherited()
    if part not in files or not _can_wrap():
        yield
        return
    copies = part in weight_files.copied() and not at_once
    shared = SharedWeights(files[part], f"{key} torch {torch.__version__}", copies=copies)
    token = _current.set(shared)
    try:
        yield
        shared.complete()
    finally:
        _current.reset(token)
        shared.close()


def pack_shared(weight: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """``pack(weight)``, or what another process got from the same call."""
    shared = _current.get()
    return pack(weight) if shared is None else shared.pack(weight, pack)


class SharedWeights:
    """One part's file: a header, written last, then the packed weights in the order of their packing."""

    def __init__(self, descriptor: int, key: str, *, copies: bool = False) -> None:
        """``copies``: what this process computes with lies in memory of its own."""
        self._copies = copies
        # opened once more, because processes that inherit a descriptor would share its lock
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._key = key
        if os.fstat(self._file).st_size == 0:
            # a model fits into memory: one sparse file of that size, mapped once
            os.ftruncate(self._file, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
        header = os.pread(self._file, _HEADER_BYTES, 0).rstrip(b"\0")
        found: dict[str, Any] | None = json.loads(header) if header else None
        self._is_writer = found is None
        self._known: Iterator[dict[str, Any]] | None = None
        self._entries: list[dict[str, Any]] = []
        self._end = _HEADER_BYTES
        if found is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._known = iter(found["entries"]) if found["key"] == key else None
        self._address = 0
        if self._is_writer or self._known is not None:
            writable = mmap.PROT_WRITE if self._is_writer else 0
            mapping = mmap.mmap(self._file, 0, prot=mmap.PROT_READ | writable)
            mapping.madvise(mmap.MADV_HUGEPAGE)  # where the system has them for shared memory
            view = np.frombuffer(mapping, dtype=np.uint8)
            _kept.append(view)
            self._address = view.ctypes.data

    def pack(self, weight: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
        """The next weight of the part: from the file, or packed now and then written there."""
        if self._known is not None:
            entry = next(self._known)
            assert entry["shape"] == list(weight.shape), "processes pack the same weights in the same order"
            address = self._address + entry["offset"]
            return _wrap(_copy(address, entry["nbytes"]) if self._copies else address, entry, weight.dtype)
        packed = pack(weight)
        if not self._is_writer:
            return packed
        nbytes: int = torch.ops.mkldnn._nbytes(packed)
        metadata = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
        layout = metadata.numpy().tobytes().hex()
        entry = {"offset": self._end, "nbytes": nbytes, "shape": list(weight.shape), "layout": layout}
        self._end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        address = self._address + entry["offset"]
        ctypes.memmove(address, torch.ops.mkldnn.data_ptr(packed), nbytes)
        self._entries.append(entry)
        return packed if self._copies else _wrap(address, entry, weight.dtype)

    def complete(self) -> None:
        """Write the header once all is packed: others may map the file now.

        Without it the next process packs again.
        """
        if self._is_writer:
            header = json.dumps({"key": self._key, "entries": self._entries}).encode()
            if len(header) <= _HEADER_BYTES:
                os.pwrite(self._file, header, 0)

    def close(self) -> None:
        """Let others have the file; tensors stay."""
        fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough: a mapping holds the file open as well
        os.close(self._file)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # glibc; the heap would keep what packing has freed
            trim(ctypes.c_size_t(0))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _can_wrap() -> bool:
    """Whether this torch has what it takes to put packed weights anywhere; what ahead-of-time Inductor uses."""
    return (
        all(hasattr(torch.ops.mkldnn, name) for name in ("_nbytes", "data_ptr", "_get_mkldnn_serialized_md"))
        and hasattr(torch._C, "_aoti")
        and hasattr(_library(), "aoti_torch_create_tensor_from_blob_v2")
    )


def _copy(address: int, nbytes: int) -> int:
    """Copy the bytes into memory that lives as long as the process; return the copy's address."""
    copy = torch.empty(nbytes, dtype=torch.uint8)
    ctypes.memmove(copy.data_ptr(), address, nbytes)
    _kept.append(copy)
    return copy.data_ptr()


def _wrap(address: int, entry: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """A packed tensor over memory that stays where it is."""
    library = _library()
    shape, layout = entry["shape"], bytes.fromhex(entry["layout"])
    sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
    handle = ctypes.c_void_p()
    name = str(dtype).removeprefix("torch.")
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{name}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(_MKLDNN_LAYOUT),
        ctypes.create_string_buffer(layout, len(layout)),
        ctypes.c_int64(len(layout)),
    )
    if status:
        raise RuntimeError(f"torch did not take packed weights of shape {shape} from shared memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return tensor
