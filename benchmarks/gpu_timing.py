"""Timing on an accelerator: on a GPU calls captured in one CUDA graph, so that the host's speed does not count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from device.base import Device

_ROUNDS, _OTHER_ROUNDS = 15, 3
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def call_ms(device: Device, calls: Sequence[Callable[[], object]]) -> float:
    """Return the milliseconds of one call: on a GPU all are captured in one graph, whose replays are timed.

    Give calls over different data, together larger than the L2 cache, where the data comes from memory in service.
    """
    if device.type != "cuda":
        return run_ms(device, lambda: [call() for call in calls]) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return run_ms(device, graph.replay) / len(calls)


def run_ms(device: Device, call: Callable[[], object]) -> float:
    """Return the median time of a call that keeps the device busy for longer than the host needs to make it."""
    call()
    times: list[float] = []
    for _ in range(_ROUNDS if device.type == "cuda" else _OTHER_ROUNDS):
        if device.type != "cuda":
            device.synchronize()
            started = time.perf_counter()
            call()
            device.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings(device: Device, *, tiny: bool) -> dict[str, float]:
    """Measure this device's peak rates with torch's own calls: a large copy (read and written), a bf16 product."""
    size = 64 if tiny else 8192
    random = partial(torch.randn, device=device.torch_device, dtype=torch.bfloat16)  # seconds on a host
    source = random(1 << (16 if tiny else 30))
    target = torch.empty_like(source)
    left, right = random(2, size, size).unbind(0)
    return {
        "copy_gb_s": 2 * source.nbytes / call_ms(device, [partial(target.copy_, source)]) / 1e6,
        "bf16_matmul_tflop_s": 2 * size**3 / call_ms(device, [partial(torch.mm, left, right)]) / 1e9,
    }


def empty_cache(device: Device) -> None:
    """Give back the unused memory of an accelerator's allocator."""
    gc.collect()
    if device.type in ("cuda", "npu"):
        torch.get_device_module(device.type).empty_cache()


@contextmanager
def never_waiting(device: Device) -> Iterator[None]:
    """Make torch refuse, within this context, calls that let the host wait for a GPU; no effect elsewhere."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def num_launches(device: Device, call: Callable[[], object]) -> int | None:
    """Count the operators, copies and graphs that a call gives to a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        device.synchronize()
    return sum(one.count for one in profile.key_averages() if any(part in one.key for part in _LAUNCHES))
