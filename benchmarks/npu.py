"""Everything that needs an Ascend NPU, in one call: what nobody has seen yet, each part with its figures.

    python -m benchmarks.npu [--out benchmarks/results/npu-NAME.json] [--only PART ...]
    python -m benchmarks.npu --device cpu --tiny     # only checks that this script runs

It needs torch_npu, transformers, pytest and hypothesis, no model and no network. It has run on no NPU.

* ``tests``: pytest over tests/ascend, where an NPU is: every operator, captured steps, streams, shares;
* ``checks``: the self-test of ``epd-serve devices --check``;
* ``operators``: attention of decodes and prompts, a tower's attention, norms, rotation and SwiGLU in milliseconds,
  beside plain torch's operators on the same device;
* ``parity``: features of the built-in model's tower on the NPU against the CPU's;
* ``transfer``: copies between host and device, pinned, and KV through shared memory and TCP;
* ``engine``: encode, prefill, decode eagerly and as graphs, two streams, for the shapes of Qwen2.5-VL-7B and
  Qwen3-VL-8B with random weights (``benchmarks.engine_gpu``; needs 40 GiB of disk and 30 GiB of memory).

Times are medians by the clock until the device is done. The exit status is 1 where a test or a target fails.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.accelerator import Part, Target, finish, run_parts, run_tests, show, versions
from benchmarks.common import argument_parser
from device import ascend
from device.base import AttentionOps, Device
from device.check import check_device, random_step
from device.ops.plain import PlainOps
from device.registry import get_device

PARTS = ("tests", "checks", "operators", "parity", "transfer", "engine")
BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 128, 8, 4, 128
_ROUNDS = 15


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/results/npu-NAME.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    parser.add_argument("--device", default="npu:0", help="npu:1 ...; cpu checks that the script runs")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check that the script runs")
    arguments = parser.parse_args()
    if arguments.device.startswith("npu") and (reason := ascend.missing()) is not None:
        print(f"benchmarks.npu needs an Ascend NPU, and there is none: {reason}", file=sys.stderr)
        return 2
    result, good = measure(get_device(arguments.device), arguments.only, tiny=arguments.tiny)
    return finish(result, good, arguments.out, "npu")


def measure(device: Device, chosen: Sequence[str], *, tiny: bool) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether all tests and targets passed."""
    device.activate()
    limits = ceilings(device, tiny=tiny)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.npu",
        "device": device.description,
        "cores": device.cores,
        "versions": versions("torch", "torch_npu", "transformers"),
        "attention": device.ops.name,
        "ceilings": limits,
    }
    show("ceilings", limits)
    parts: dict[str, Part] = {
        "tests": lambda: (run_tests("tests/ascend"), []),
        "checks": partial(measure_checks, device),
        "operators": lambda: (measure_operators(device, tiny=tiny), []),
        "parity": partial(measure_parity, device),
        "transfer": lambda: (measure_transfer(device, tiny=tiny), []),
        "engine": lambda: (measure_engine(device, limits, tiny=tiny), []),
    }
    return result, run_parts(device, result, parts, chosen)


def measure_engine(device: Device, limits: dict[str, float], *, tiny: bool) -> dict[str, Any]:
    """The figures of each shape; its weights are drawn on the device."""
    from benchmarks.engine_gpu import ENGINE_SHAPES, measure_shape
    from benchmarks.models import make_shape

    results: dict[str, Any] = {}
    for name in ("tiny",) if tiny else ENGINE_SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            path = make_shape(name, Path(folder, name), device.name)
            results[name] = dict(measure_shape(path, device, limits, tiny=tiny))
    return results


def call_ms(device: Device, call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """The median time of a call until the device is done with it."""
    times: list[float] = []
    for _ in range(rounds + 2):  # the first ones compile and allocate
        device.synchronize()
        started = time.perf_counter()
        call()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1e3


def ceilings(device: Device, *, tiny: bool) -> dict[str, float]:
    """Rates of torch's own calls: a large copy, bytes read and written, and a bf16 matrix product."""
    where, size = device.torch_device, 256 if tiny else 8192
    source = torch.zeros(1 << (20 if tiny else 30), dtype=torch.bfloat16, device=where)
    target = torch.empty_like(source)
    left, right = torch.randn(2, size, size).to(where, torch.bfloat16).unbind(0)
    return {
        "copy_gb_s": 2 * source.nbytes / call_ms(device, partial(target.copy_, source)) / 1e6,
        "bf16_matmul_tflop_s": 2 * size**3 / call_ms(device, partial(torch.mm, left, right)) / 1e9,
    }


def measure_checks(device: Device) -> tuple[list[dict[str, Any]], list[Target]]:
    """The self-test's rows; none may have failed."""
    rows = [{"check": row.check, "passed": row.passed, "detail": row.detail} for row in check_device(device)]
    failed = sum(not row["passed"] for row in rows)
    return rows, [Target(name="failed self-tests", measured=failed, required=0, at_least=False)]


@torch.inference_mode()
def measure_operators(device: Device, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each operator, ours and plain torch's."""
    from benchmarks.gpu_layers import layer_calls

    steps: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
        "decode 1 x 2048": ([2048], []),
        "decode 16 x 2048": ([2048] * 16, []),
        "prompt of 2048": ([], [(2048, 2048)]),
        "1024 after 3072": ([], [(1024, 4096)]),
        "16 decodes and a chunk of 512": ([2048] * 16, [(512, 2048)]),
    }
    if tiny:
        steps = {"decode 2 x 64": ([64, 64], []), "prompt of 64": ([], [(64, 64)])}
    results: dict[str, dict[str, float]] = {}
    for label, ops in (("ours", device.ops), ("torch", PlainOps())):
        calls = {name: _attention_call(device, ops, *step) for name, step in steps.items()}
        for head_dim in (72, 80):
            calls[f"vision, heads of {head_dim}"] = _vision_call(device, ops, 64 if tiny else 4096, head_dim)
        for tokens in (8,) if tiny else (64, 4096):
            for name, call in layer_calls(ops, tokens, device.torch_device).items():
                calls[f"{name}, {tokens} tokens"] = call
        for name, call in calls.items():
            results.setdefault(name, {})[label] = call_ms(device, call)
    return results


def _attention_call(
    device: Device, ops: AttentionOps, decodes: list[int], prefills: list[tuple[int, int]]
) -> Callable[[], object]:
    """One layer of a step: the cache is written, then read."""
    chunks = [*((1, context) for context in decodes), *prefills]
    return random_step(ops, device.torch_device, torch.bfloat16, *chunks, heads=KV_HEADS, size=BLOCK_SIZE)[1]


def _vision_call(device: Device, ops: AttentionOps, patches: int, head_dim: int) -> Callable[[], object]:
    shape = (3, patches, 16, head_dim)
    states = torch.randn(shape).to(device.torch_device, torch.bfloat16).unbind(0)
    return partial(ops.encode, *states, list(accumulate([patches], initial=0)), head_dim**-0.5)


def measure_parity(device: Device) -> tuple[dict[str, Any], list[Target]]:
    """Compare this device's features of a smooth picture with a CPU's."""
    from epd_serve.demo import weights_dir
    from epd_serve.models.loader import load_family
    from epd_serve.models.tower import Tower

    path = weights_dir()
    columns = torch.arange(112) % 256
    picture = torch.stack((columns, 255 - columns, columns.flip(0)), dim=-1).to(torch.uint8).expand(84, -1, -1)
    inputs = load_family(path).preprocess(picture.numpy())
    theirs, ours = (
        Tower(path, torch.bfloat16, one).encode([inputs])[0].cpu() for one in (device, get_device("cpu"))
    )
    error = float((theirs.double() - ours.double()).norm() / ours.double().norm())
    target = Target(name="relative error of bfloat16 features", measured=error, required=0.05, at_least=False)
    return {"relative_error": error}, [target]


def measure_transfer(device: Device, *, tiny: bool) -> dict[str, float]:
    """GB/s of pinned copies, and of KV from this device into another endpoint's memory on this machine."""
    from epd_serve.transfer.embedded import EmbeddedTransport

    count = 1 << (20 if tiny else 28)
    there = torch.zeros(count, dtype=torch.uint8, device=device.torch_device)
    here = device.pin_memory(torch.zeros(count, dtype=torch.uint8))
    copies: dict[str, Callable[[], object]] = {
        "host to device": partial(there.copy_, here, non_blocking=True),
        "device to host": partial(here.copy_, there, non_blocking=True),
    }
    results = {name: count / call_ms(device, call) / 1e6 for name, call in copies.items()}
    paths: tuple[Literal["shm", "tcp"], ...] = ("shm", "tcp")
    for path in paths:
        owner, reader = EmbeddedTransport(path=path), EmbeddedTransport(path=path)
        try:
            slab = owner.allocate("kv", count)

            def fetch(reader: EmbeddedTransport = reader, region: Any = slab.region) -> None:
                reader.read(region, [(0, memoryview(here.numpy()))])
                there.copy_(here, non_blocking=True)
                device.synchronize()

            results[f"a peer's memory to the device, {path}"] = count / call_ms(device, fetch) / 1e6
        finally:
            owner.close()
            reader.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
