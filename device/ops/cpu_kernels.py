"""C++ operators, used if a compiler is installed: ``cpu_kernels.cpp``, and ``amx_kernels.cpp`` for AMX.

A library is compiled (two seconds) when its first model is loaded and kept in the cache directory under a name
made from its source, flags and processor. ``EPD_SERVE_CPU_KERNELS=0`` disables them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from device.base import AttnMeta
from device.host import processor_features

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-fopenmp", "-w")
FOR_AMX, FOR_ALL = (Path(__file__).with_name(f"{name}.cpp") for name in ("amx_kernels", "cpu_kernels"))
_COMPILE_TIMEOUT_S = 120.0
_STRIP, _DEPTH = 32, 32
_MAX_GROUP, _MAX_HEAD_DIM = 16, 256
#: Rows above which oneDNN's product is faster, because compute rather than loading of weights dominates.
MAX_ROWS = 32
#: The same for products with unpacked weights.
_MAX_PLAIN_ROWS = 64
ACTIVATIONS = {"none": 0, "swish": 1, "gelu_tanh": 2}


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ["x", "weight", "bias", "other", "out"]),
        *(
            (name, ctypes.c_int64)
            for name in ["x_stride", "rows", "width", "depth", "activation", "multiplies", "threads"]
        ),
    )


class _Decode(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ["query", "keys", "values", "tables", "lengths", "out"]),
        *((name, ctypes.c_int64) for name in ["query_stride", "table_stride", "batch", "query_heads", "kv_heads"]),
        *((name, ctypes.c_int64) for name in ("dim", "block_size")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int64),
    )


class _Kernels:
    """Operators common to both libraries. Each ``takes_…`` returns whether it supports the inputs."""

    dtypes: tuple[torch.dtype, ...]
    #: A head's dimension must be a multiple of this.
    lanes: int

    def takes_decodes(self, query: Tensor, kv_layer: Tensor) -> bool:
        query_heads, kv_heads, head_dim = query.shape[1], *kv_layer.shape[3:]
        return (
            _is_packed(query, 2)
            and query.dtype in self.dtypes
            and kv_layer.dtype == query.dtype
            and kv_layer[0].is_contiguous()
            and head_dim % self.lanes == 0
            and head_dim <= _MAX_HEAD_DIM
            and query_heads // kv_heads <= _MAX_GROUP
        )

    def decode(self, query: Tensor, kv_layer: Tensor, meta: AttnMeta, scale: float) -> Tensor:
        """Attend from the last token of each sequence [B, Hq, D] to its pages, read in place."""
        output = query.new_empty(query.shape)
        _, _, block_size, kv_heads, head_dim = kv_layer.shape
        table, lengths = meta.decode_block_table.contiguous(), meta.decode_context_lens.contiguous()
        assert table.dtype == torch.int32 and lengths.dtype == torch.int64, "the kernel would misread other dtypes"
        call = _Decode(
            query.data_ptr(),
            kv_layer[0].data_ptr(),
            kv_layer[1].data_ptr(),
            table.data_ptr(),
            lengths.data_ptr(),
            output.data_ptr(),
            query.stride(0),
            table.shape[1],
            len(query),
            query.shape[1],
            kv_heads,
            head_dim,
            block_size,
            scale,
            torch.get_num_threads(),
        )
        self._decode_function(query.dtype)(ctypes.byref(call))
        return output

    def _decode_function(self, dtype: torch.dtype) -> Any:
        raise NotImplementedError


class AmxKernels(_Kernels):
    """AMX operators on bfloat16 tensors."""

    dtypes = (torch.bfloat16,)
    lanes = 32

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def packed_address(self, packed: Tensor, weight: Tensor) -> int | None:
        """Return the address of oneDNN's packed weight; None if :meth:`linear` cannot read its layout."""
        width, depth = weight.shape
        strips, depths = -(-width // _STRIP), -(-depth // _DEPTH)
        strip_bytes = _STRIP * depths * _DEPTH * 2
        if depth % _DEPTH or width < _STRIP or torch.ops.mkldnn._nbytes(packed) != strips * strip_bytes:
            return None
        address: int = torch.ops.mkldnn.data_ptr(packed)
        for strip in {0, width // _STRIP - 1}:
            rows = weight[strip * _STRIP : (strip + 1) * _STRIP]
            laid_out = rows.reshape(_STRIP, depths, _DEPTH // 2, 2).permute(1, 2, 0, 3).contiguous()
            found = (ctypes.c_char * strip_bytes).from_address(address + strip * strip_bytes)
            if bytes(found) != laid_out.view(torch.uint8).numpy().tobytes():
                return None
        return address

    def takes_rows(self, states: Tensor) -> bool:
        return 0 < len(states) <= MAX_ROWS and states.dtype == torch.bfloat16 and _is_packed(states, 1)

    def linear(
        self,
        states: Tensor,
        address: int,
        width: int,
        bias: Tensor | None,
        activation: str,
        other: Tensor | None,
        multiplies: bool,
    ) -> Tensor:
        """Return ``activation(states @ weight.T + bias)`` plus or times ``other``; [T, depth] → [T, width]."""
        output = states.new_empty(len(states), width)
        other = None if other is None else other.contiguous()  # kept alive until the call returns
        product = _Product(
            states.data_ptr(),
            address,
            _address(bias),
            _address(other),
            output.data_ptr(),
            states.stride(0),
            len(states),
            width,
            states.shape[1],
            ACTIVATIONS[activation],
            multiplies,
            torch.get_num_threads(),
        )
        self._library.epd_linear(ctypes.byref(product))
        return output

    def _decode_function(self, dtype: torch.dtype) -> Any:
        return self._library.epd_decode


class CpuKernels(_Kernels):
    """Operators for any CPU on float32 or bfloat16 tensors."""

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lanes = library.epd_lanes()
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        arguments = {
            "rows": [pointer, integer, *(pointer,) * 3, *(integer,) * 4],
            "norm": [pointer, integer, *(pointer,) * 4, *(integer,) * 3, ctypes.c_float, integer],
            "rotary": [pointer, integer, *(pointer,) * 3, *(integer,) * 4],
            "decode": [pointer],
        }
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, types in arguments.items():
            for dtype, suffix in zip(self.dtypes, ("float", "bfloat16"), strict=True):
                function = getattr(library, f"epd_{name}_{suffix}")
                function.argtypes = types
                self._functions[name, dtype] = function

    def takes_rows(self, states: Tensor, weight: Tensor) -> bool:
        return 0 < len(states) <= _MAX_PLAIN_ROWS and states.dtype == weight.dtype and _is_packed(states, 1)

    def linear(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``states @ weight.T + bias`` for a contiguous weight [out, in]; [T, in] → [T, out]."""
        width, depth = weight.shape
        output = states.new_empty(len(states), width)
        self._functions["rows", weight.dtype](
            states.data_ptr(),
            states.stride(0),
            weight.data_ptr(),
            _address(bias),
            output.data_ptr(),
            len(states),
            width,
            depth,
            torch.get_num_threads(),
        )
        return output

    def takes_norm(self, hidden: Tensor, weight: Tensor) -> bool:
        return (
            _is_packed(hidden, hidden.dim() - 1)
            and hidden.dtype in self.dtypes
            and weight.dtype == hidden.dtype
            and len(weight) % self.lanes == 0
        )

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        output = hidden.new_empty(hidden.shape)
        self._norm(hidden, None, weight, output, None, epsilon)
        return output

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        output, total = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
        self._norm(hidden, residual.contiguous(), weight, output, total, epsilon)
        return output, total

    def _norm(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        output: Tensor,
        total: Tensor | None,
        epsilon: float,
    ) -> None:
        self._functions["norm", hidden.dtype](
            hidden.data_ptr(),
            hidden.stride(0),
            _address(residual),
            weight.data_ptr(),
            output.data_ptr(),
            _address(total),
            len(hidden),
            hidden.shape[1] if hidden.dim() == 3 else 1,
            hidden.shape[-1],
            epsilon,
            torch.get_num_threads(),
        )

    def takes_rotary(self, states: Tensor, cos: Tensor, sin: Tensor) -> bool:
        return (
            _is_packed(states, 2)
            and states.dtype in self.dtypes
            and states.shape[-1] % (2 * self.lanes) == 0
            and cos.dtype == torch.float32
            and cos.shape == (len(states), states.shape[-1])
            and cos.is_contiguous()
            and sin.shape == cos.shape
            and sin.dtype == cos.dtype
            and sin.is_contiguous()
        )

    def rotary(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [T, H, D] by contiguous tables [T, D], computing in float32."""
        tokens, heads, head_dim = states.shape
        output = states.new_empty(states.shape)
        self._functions["rotary", states.dtype](
            states.data_ptr(),
            states.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            output.data_ptr(),
            tokens,
            heads,
            head_dim,
            torch.get_num_threads(),
        )
        return output

    def _decode_function(self, dtype: torch.dtype) -> Any:
        return self._functions["decode", dtype]


@cache
def cpu_kernels() -> CpuKernels | None:
    """Return the kernels for any CPU, compiling them if needed; None if that fails."""
    library = _library(FOR_ALL)
    return None if library is None else CpuKernels(library)


@cache
def amx_kernels() -> AmxKernels | None:
    """Return the AMX kernels, compiling them if needed; None if they cannot run."""
    if not (
        torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported() and torch.cpu._init_amx()
    ):
        return None
    library = _library(FOR_AMX)
    return None if library is None else AmxKernels(library)


def _library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled library of a source; None, with a log line, if it is unavailable."""
    if os.environ.get("EPD_SERVE_CPU_KERNELS") == "0":
        return None
    compiler = shutil.which("g++")
    if compiler is None:
        _log.warning("g++ not found: decodes on this CPU run slower without compiled kernels")
        return None
    library = library_path(source)
    try:
        with suppress(OSError):
            return ctypes.CDLL(str(library))
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:  # instances start together: one compiles for all
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return ctypes.CDLL(str(library))
            except OSError:  # missing, or truncated by a crash
                _compile(compiler, source, library)
                return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("CPU kernels do not compile, using torch's operators instead: %s", reason)
        return None


def library_path(source: Path) -> Path:
    """Return the cache path of the library compiled from a source for this processor."""
    key = hashlib.sha256(source.read_bytes() + " ".join((*_FLAGS, processor_features())).encode()).hexdigest()
    name = f"{source.stem}-{key[:32]}.so"
    if folder := os.environ.get("EPD_SERVE_CACHE"):
        return Path(folder) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd-serve" / name


def _compile(compiler: str, source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        built = Path(directory) / library.name
        command = [compiler, *_FLAGS, str(source), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
        built.replace(library)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_packed(states: Tensor, dims: int) -> bool:
    """Return whether the last ``dims`` (1 or 2) dimensions of [T, ...] are contiguous, whatever T's stride."""
    return (
        states.dim() == dims + 1
        and 1 <= dims <= 2
        and states.device.type == "cpu"
        and states.stride(-1) == 1
        and (dims == 1 or states.stride(-2) == states.shape[-1])
    )
