"""Triton compiles each kernel for an H100, without one: the interpreter runs also what the compiler refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from program import run_file

if importlib.util.find_spec("triton") is None:
    pytest.skip("not run: Triton is not installed", allow_module_level=True)

KERNELS = "_draw _merge _rms_norm _rotate _split _survey _swiglu _write"


@pytest.mark.slow
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    output = run_file(__file__, timeout_s=500, TRITON_CACHE_DIR=str(tmp_path))
    assert output.split() == [f"{name}_kernel" for name in KERNELS.split()]


def _main() -> None:
    from attention_contract import Batch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from device.ops.triton_ops import TritonOps

    class Hopper:
        """As much of a driver as compiling takes."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    compiled: set[str] = set()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert run(kernel, *args, grid=grid, warmup=True, **options).asm["cubin"]
        compiled.add(kernel.__name__)

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    ops, bfloat16 = TritonOps(cores=132, varlen=None), torch.bfloat16
    Batch([700], [(5, 5)], block_size=16, kv_heads=2, group=7, head_dim=128, seed=0).run(ops, bfloat16)
    hidden, heads = torch.zeros(4, 3584, dtype=bfloat16), torch.zeros(4, 28, 128, dtype=bfloat16)
    ops.add_rms_norm(hidden, hidden, hidden[0], 1e-6)
    ops.rotary(heads, heads, *torch.zeros(2, 4, 128).unbind(0))
    ops.swiglu(hidden)
    ops.draw(torch.zeros(2, 151936), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4))
    print("\n".join(sorted(compiled)))


if __name__ == "__main__":
    _main()
