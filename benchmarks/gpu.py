"""Everything that needs an NVIDIA GPU, in one call: the device tests, then how fast the kernels are.

Run as ``python -m benchmarks.gpu [--out benchmarks/results/gpu-NAME.json]`` from the root of the repository. It
needs torch, triton, transformers, pytest, hypothesis, pillow and the wheels in ``WHEELS``, which have 12 MiB with
all that they need, no model and no network, and takes a few minutes:

* ``tests``: pytest over tests/device, so that every operator is compared with the oracle on this GPU;
* ``ceilings``: the bandwidth of a 2 GiB copy (bytes read and written) and the rate of a bf16 matrix product;
* ``write``: write_kv; at least 70 % of the copy's bandwidth;
* ``decode``: paged decode attention, 8 KV heads of 128, GQA group 4; at least 80 % of it at 64 x 2048;
* ``prefill``: attention of prompts and chunks of Qwen2.5-VL-7B's shape; at most 1.3 times the best of torch's
  SDPA (cuDNN, flash, efficient) and varlen calls, and right;
* ``vision``: a tower's attention with heads of 64, 72 and 80;
* ``layers``: norms, rotation and SwiGLU against plain torch;
* ``sample``: draws from 152,000 tokens, 64 and 256 rows, against a sorted vocabulary; at most 1 ms;
* ``model``: a decode step of Qwen2.5-VL-7B's shape, random weights, as a CUDA graph: equal to eager, timed;
* ``engine``: encode, prefill, decode and two streams of Qwen2.5-VL-7B's and Qwen3-VL-8B's shapes, random weights;
  small pictures and mixed steps with and without graphs, with their launches
  (``benchmarks.engine_gpu``; needs 40 GiB of disk and 30 GiB of GPU memory);
* ``handoff``: the KV of a prompt of 2000 tokens (Qwen3-VL-8B's shape), and the feature of a picture, from one
  process to another: from device to device, through the host by shared memory and by TCP, and over Mooncake from
  device to device where it reaches the GPU's memory (``benchmarks.handoff``); at most 10 ms for the first;
* ``colocation``: TPOT and encodes a second of Qwen2.5-VL-7B's shape side by side on the GPU: without priorities,
  with them, with the tower in a green context, in two processes without MPS and with its shares
  (``benchmarks.colocation``);
* ``tune``: the decode kernel's tiles, warps and stages.

Times are medians over CUDA events. The exit status is 1 where a test or a target fails.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.accelerator import Part, Target

#: What an image with torch and transformers may lack.
WHEELS = ("blake3", "httptools", "msgspec", "psutil", "pydantic", "ruamel.yaml", "uvicorn")
_OTHERS = ("torch", "triton", "transformers", "pytest", "hypothesis", "numpy", "PIL")
PARTS = (
    "tests",
    "write",
    "decode",
    "prefill",
    "vision",
    "layers",
    "sample",
    "model",
    "engine",
    "handoff",
    "colocation",
    "tune",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/results/gpu-NAME.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    arguments = parser.parse_args()
    if lacking := [name for name in (*_OTHERS, *WHEELS) if not _is_there(name)]:
        print(
            f"benchmarks.gpu lacks {', '.join(lacking)}. Where there is a network: pip download -d wheels "
            f"{' '.join(WHEELS)}; here: pip install --no-index --find-links wheels {' '.join(WHEELS)}",
            file=sys.stderr,
        )
        return 2
    import torch

    from benchmarks.accelerator import finish

    if not torch.cuda.is_available():
        print(f"benchmarks.gpu needs an NVIDIA GPU: torch {torch.__version__} sees none here", file=sys.stderr)
        return 2
    result, good = measure(torch.cuda.get_device_name(0), arguments.only)
    return finish(result, good, arguments.out, "gpu")


def measure(name: str, chosen: tuple[str, ...] | list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether all tests and targets passed."""
    import torch

    from benchmarks import colocation, engine_gpu, gpu_attention, gpu_memory, gpu_model, gpu_sampling, gpu_timing
    from benchmarks.accelerator import run_parts, run_tests, show, versions
    from device.registry import get_device

    device = get_device("cuda:0")
    device.activate()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.gpu",
        "device": name,
        "multiprocessors": device.cores,
        "versions": versions("torch", "triton", "transformers"),
        "cuda": torch.version.cuda,
        "attention": device.ops.name,
    }
    if "tests" in chosen:
        result["tests"] = run_tests("tests/device")
    limits = result["ceilings"] = gpu_timing.ceilings(device.torch_device)
    copy_gb_s = limits["copy_gb_s"]
    show("ceilings", limits)
    parts: dict[str, Part] = {
        "write": partial(gpu_memory.measure_write, device, copy_gb_s),
        "decode": partial(gpu_memory.measure_decode, device, copy_gb_s),
        "prefill": partial(gpu_attention.measure_prefill, device),
        "vision": lambda: (gpu_attention.measure_vision(device), []),
        "layers": lambda: (gpu_model.measure_layers(device), []),
        "sample": partial(gpu_sampling.measure_sampling, device),
        "model": partial(gpu_model.measure_model, device, copy_gb_s),
        "engine": lambda: (engine_gpu.measure_engine(device, limits), []),
        "handoff": _handoff,
        "colocation": lambda: (colocation.measure(device, limits), []),
        "tune": lambda: (gpu_memory.tune_decode(device, copy_gb_s), []),
    }
    return result, run_parts(device, result, parts, chosen)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _handoff() -> tuple[dict[str, Any], list[Target]]:
    from benchmarks import handoff

    rows, targets = handoff.measure("cuda:0")
    features, more = handoff.measure_feature("cuda:0")
    return {"kv": rows, "features": features}, targets + more


if __name__ == "__main__":
    sys.exit(main())
