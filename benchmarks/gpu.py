"""Everything that needs an NVIDIA GPU, in one call: the device tests, then how fast the kernels are.

Run as ``python -m benchmarks.gpu [--out benchmarks/results/gpu-NAME.json]`` from the root of the repository. It
needs torch, triton, transformers, pytest and hypothesis, no model and no network, and takes a few minutes:

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
* ``engine``: encode, prefill, decode and two streams of Qwen2.5-VL-7B's and Qwen3-VL-8B's shapes, random weights
  (``benchmarks.engine_gpu``; needs 40 GiB of disk and 30 GiB of GPU memory);
* ``tune``: the decode kernel's tiles, warps and stages.

Times are medians over CUDA events. The exit status is 1 where a test or a target fails.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, argument_parser, write

PARTS = ("tests", "write", "decode", "prefill", "vision", "layers", "sample", "model", "engine", "tune")
# On a GPU machine plugins of the full test environment may be missing, and libraries warn of this and that.
PYTEST = ("--noconftest", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider")


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/results/gpu-NAME.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"benchmarks.gpu needs an NVIDIA GPU: torch {torch.__version__} sees none here", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(0)
    out = arguments.out or ROOT / "benchmarks/results" / f"gpu-{name.lower().replace(' ', '-')}.json"
    result, good = measure(name, arguments.only)
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, result)
    print(f"\n{'all passed' if good else 'NOT all passed'}; written to {out}")
    return 0 if good else 1


def measure(name: str, parts: tuple[str, ...] | list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether all tests and targets passed."""
    from benchmarks import engine_gpu, gpu_attention, gpu_memory, gpu_model, gpu_sampling, gpu_timing
    from device.registry import get_device

    device = get_device("cuda:0")
    device.activate()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.gpu",
        "device": name,
        "multiprocessors": device.cores,
        "versions": {package: _version(package) for package in ("torch", "triton", "transformers")},
        "cuda": torch.version.cuda,
        "attention": device.ops.name,
    }
    if "tests" in parts:
        result["tests"] = run_tests()
    result["ceilings"] = gpu_timing.ceilings(device.torch_device)
    copy_gb_s = result["ceilings"]["copy_gb_s"]
    _show("ceilings", result["ceilings"])
    calls = {
        "write": lambda: gpu_memory.measure_write(device, copy_gb_s),
        "decode": lambda: gpu_memory.measure_decode(device, copy_gb_s),
        "prefill": lambda: gpu_attention.measure_prefill(device),
        "vision": lambda: (gpu_attention.measure_vision(device), []),
        "layers": lambda: (gpu_model.measure_layers(device), []),
        "sample": lambda: gpu_sampling.measure_sampling(device),
        "model": lambda: gpu_model.measure_model(device, copy_gb_s),
        "engine": lambda: (engine_gpu.measure_engine(device, result["ceilings"]), []),
        "tune": lambda: (gpu_memory.tune_decode(device, copy_gb_s), []),
    }
    targets: list[gpu_timing.Target] = []
    for part, call in calls.items():
        if part not in parts:
            continue
        started = time.perf_counter()
        # SDPA explains in warnings why a backend takes no such shape.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result[part], found = call()
        targets += found
        torch.cuda.empty_cache()
        _show(f"{part} ({time.perf_counter() - started:.0f} s)", result[part])
    result["targets"] = [target.as_json() for target in targets]
    for target in targets:
        sign = ">=" if target.at_least else "<="
        verdict = "pass" if target.passed else "FAIL"
        print(f"{verdict}  {target.name}: {target.measured:.3g} (required {sign} {target.required:g})")
    good = all(target.passed for target in targets) and result.get("tests", {}).get("passed", True)
    return result, bool(good)


def run_tests() -> dict[str, Any]:
    """tests/device in a process of its own, shown as it runs."""
    command = [sys.executable, "-m", "pytest", "tests/device", *PYTEST]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout[-6000:], flush=True)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    return {"passed": done.returncode == 0, "summary": summary, "seconds": round(time.perf_counter() - started)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(title: str, values: Any) -> None:
    print(f"\n== {title}")
    for row in values if isinstance(values, list) else values.items():
        print("  ", json.dumps(row, default=str)[:400], flush=True)


if __name__ == "__main__":
    sys.exit(main())
