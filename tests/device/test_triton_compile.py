"""The Triton kernels compiled to Hopper's machine code, which needs no GPU: what the interpreter lets through
fails here, and what makes a kernel slow (spilled registers, narrow loads) shows.

A process of its own compiles them: in this one the kernels may already be the interpreter's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="not run: Triton is not installed"),
    pytest.mark.timeout(600),  # the compilation is one process's work
]

HALF_CASES = {
    f"decode {dtype} d{head_dim} group {group} block {block_size}": (dtype, dtype, head_dim, group, block_size)
    for dtype, head_dim, group, block_size in (
        ("bfloat16", 64, 7, 16),
        ("bfloat16", 80, 1, 32),
        ("bfloat16", 128, 7, 16),
        ("bfloat16", 256, 8, 48),
        ("float16", 128, 4, 256),
    )
}
DECODE_CASES = HALF_CASES | {
    "decode bfloat16 d128 of a float8 cache": ("bfloat16", "float8_e4m3fn", 128, 7, 16),
    "decode float32 d128": ("float32", "float32", 128, 7, 16),
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
}
HOPPER_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """The code that each case compiled to, by its name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__],
            env=environment | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            timeout=570,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode_compiles_without_spilling(compiled: dict[str, Any], case: str) -> None:
    for kernel in compiled[case]:
        assert kernel["shared_bytes"] <= HOPPER_SHARED_BYTES
        assert "float32" in case or kernel["stack_bytes"] == 0, kernel


@pytest.mark.parametrize("case", HALF_CASES)
def test_decode_loads_sixteen_bytes_a_thread_asynchronously(compiled: dict[str, Any], case: str) -> None:
    split = compiled[case][0]
    assert split["name"] == "_split_kernel"
    assert split["instructions"].get("LDGSTS.E.BYPASS.128", 0) >= 16
    assert any(name.startswith("HMMA.16816") for name in split["instructions"])


@pytest.mark.parametrize(
    "case", ["write", "write many", "rms_norm", "add_rms_norm", "head norm", "rotate", "swiglu", "draw"]
)
def test_small_kernels_load_and_store_widely(compiled: dict[str, Any], case: str) -> None:
    for kernel in compiled[case]:
        wide = [name for name in kernel["instructions"] if name.startswith("LDG") and name.endswith(("128", "64"))]
        assert wide and kernel["stack_bytes"] == 0, kernel


def _compile_launches(call: Callable[[], object]) -> list[dict[str, Any]]:
    """Run ``call`` with every kernel launch replaced by a compilation for the arguments it is given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    found: list[dict[str, Any]] = []

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            specialised = not parameter.do_not_specialize
            if parameter.is_constexpr or (specialised and isinstance(value, int) and value == 1):
                signature[parameter.name], constants[(i,)] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name], divisible = "*" + TYPES[value.dtype], True
            elif isinstance(value, float):
                signature[parameter.name], divisible = "fp32", False
            else:
                signature[parameter.name], divisible = "i32", value % 16 == 0
            if divisible and specialised:
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, attributes)
        chosen = {name: value for name, value in options.items() if name not in names}
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)
        found.append(
            {"name": kernel.__name__, "shared_bytes": binary.metadata.shared} | _inspect(binary.asm["cubin"])
        )

    original, JITFunction.run = JITFunction.run, compile_instead
    try:
        call()
    finally:
        JITFunction.run = original
    return found


def _inspect(cubin: bytes) -> dict[str, Any]:
    """Registers, stack and how often each memory and matrix instruction stands in the code."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    instructions: dict[str, int] = {}
    for name in re.findall(r"\b((?:LDG|LDGSTS|STG|HMMA|LDL|STL)(?:\.\w+)*)\b", code):
        instructions[name] = instructions.get(name, 0) + 1
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    assert registers is not None and stack is not None
    return {"registers": int(registers[1]), "stack_bytes": int(stack[1]), "instructions": instructions}


def _main() -> None:
    from device.ops import triton_decode, triton_layers, triton_sample

    results: dict[str, Any] = {}
    for name, (dtype, cached, head_dim, group, block_size) in DECODE_CASES.items():
        query = torch.empty(2, 2 * group, head_dim, dtype=getattr(torch, dtype))
        kv_layer = torch.empty(2, 4, block_size, 2, head_dim, dtype=getattr(torch, cached))
        table, lengths = torch.zeros(2, 64, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
        results[name] = _compile_launches(
            lambda q=query, kv=kv_layer, t=table, n=lengths: triton_decode.paged_decode(
                q, kv, t, n, 0.1, cores=132
            )
        )
    kv_layer = torch.empty(2, 4, 16, 8, 128, dtype=torch.bfloat16)
    fused = torch.empty(4096, 48 * 128, dtype=torch.bfloat16).view(4096, 48, 128)
    for name, tokens in (("write", 64), ("write many", 4096)):
        key, value = fused[:tokens, 32:40], fused[:tokens, 40:]
        slots = torch.zeros(tokens, dtype=torch.int64)
        results[name] = _compile_launches(
            lambda k=key, v=value, s=slots: triton_layers.write_kv(k, v, kv_layer, s)
        )
    hidden, weight = torch.empty(64, 3584, dtype=torch.bfloat16), torch.empty(3584, dtype=torch.bfloat16)
    results["rms_norm"] = _compile_launches(lambda: triton_layers.rms_norm(hidden, None, weight, 1e-6))
    results["add_rms_norm"] = _compile_launches(lambda: triton_layers.rms_norm(hidden, hidden, weight, 1e-6))
    results["head norm"] = _compile_launches(
        lambda: triton_layers.rms_norm(fused[:64, :32], None, weight[:128], 1e-6)
    )
    tables = torch.empty(64, 128)
    results["rotate"] = _compile_launches(lambda: triton_layers.rotate(fused[:64, :28], tables, tables))
    gate_up = torch.empty(64, 2 * 18944, dtype=torch.bfloat16)
    results["swiglu"] = _compile_launches(lambda: triton_layers.swiglu(gate_up))
    scores = torch.empty(64, 151936)
    counters, limits = torch.zeros(64, 3, dtype=torch.int64), torch.ones(64, 4)
    results["draw"] = _compile_launches(lambda: triton_sample.draw(scores, counters, limits))
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
