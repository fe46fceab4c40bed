"""Shared by benchmarks.gpu and benchmarks.npu: parts that run one after another, targets, the result file."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT, write
from device.base import Device

# On a machine with an accelerator plugins of the full test environment may be missing, and libraries warn.
PYTEST = (
    *("--noconftest", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider"),
    *("-o", "addopts=--import-mode=importlib"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One requirement and what was measured of it."""

    name: str
    measured: float
    required: float
    at_least: bool

    @property
    def passed(self) -> bool:
        return self.measured >= self.required if self.at_least else self.measured <= self.required

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


Part = Callable[[], tuple[Any, list[Target]]]
"""Returns what it measured, and its requirements."""


def empty_cache(device: Device) -> None:
    """Give back what the allocator of an accelerator holds and nobody uses."""
    gc.collect()
    if device.type in ("cuda", "npu"):
        torch.get_device_module(device.type).empty_cache()


@contextmanager
def never_waiting(device: Device) -> Iterator[None]:
    """A context in which torch refuses what would let the host wait for a GPU; nothing on other devices."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def num_launches(device: Device, call: Callable[[], object]) -> int | None:
    """Operators, copies and graphs that a call gives to a GPU; None on others."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        device.synchronize()
    return sum(one.count for one in profile.key_averages() if any(part in one.key for part in _LAUNCHES))


def run_parts(device: Device, result: dict[str, Any], parts: Mapping[str, Part], chosen: Collection[str]) -> bool:
    """Put the chosen parts and all targets into ``result``. Returns whether tests and targets passed."""
    targets: list[Target] = []
    for part in (name for name in parts if name in chosen):
        started = time.perf_counter()
        # SDPA explains in warnings why a backend takes no such shape.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result[part], found = parts[part]()
        targets += found
        empty_cache(device)
        show(f"{part} ({time.perf_counter() - started:.0f} s)", result[part])
    result["targets"] = [target.as_json() for target in targets]
    for target in targets:
        sign = ">=" if target.at_least else "<="
        verdict = "pass" if target.passed else "FAIL"
        print(f"{verdict}  {target.name}: {target.measured:.3g} (required {sign} {target.required:g})")
    return all(target.passed for target in targets) and bool(result.get("tests", {}).get("passed", True))


def finish(result: dict[str, Any], good: bool, out: Path | None, kind: str) -> int:
    """Write the file; returns the exit status."""
    out = out or RESULTS / f"{kind}-{str(result['device']).lower().replace(' ', '-')}.json"
    write(out, result)
    print(f"\n{'all passed' if good else 'NOT all passed'}; written to {out}")
    return 0 if good else 1


def run_tests(folder: str) -> dict[str, Any]:
    """The tests of a folder in a process of its own, shown as it runs."""
    command = [sys.executable, "-m", "pytest", folder, *PYTEST]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout[-6000:], flush=True)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    return {"passed": done.returncode == 0, "summary": summary, "seconds": round(time.perf_counter() - started)}


def versions(*packages: str) -> dict[str, str | None]:
    """None for what is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def show(title: str, values: Any) -> None:
    print(f"\n== {title}")
    for row in values if isinstance(values, list) else values.items():
        print("  ", json.dumps(row, default=str)[:400], flush=True)
