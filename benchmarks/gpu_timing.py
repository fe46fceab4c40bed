"""Timing on a device: on a GPU calls captured in one CUDA graph, so that the host's speed does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from device.base import Device

_ROUNDS, _OTHER_ROUNDS = 15, 3


def call_ms(device: Device, calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of one call: on a GPU all are captured in one graph, whose replays are timed.

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
    """The median time of a call that keeps the device busy for longer than the host needs to make it."""
    call()
    times: list[float] = []
    for _ in range(_ROUNDS if device.type == "cuda" else _OTHER_ROUNDS):
        if device.type != "cuda":
            times.append(host_ms(device, call))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def host_ms(device: Device, call: Callable[[], object]) -> float:
    """Milliseconds on the clock of one call, until the device is done."""
    device.synchronize()
    started = time.perf_counter()
    call()
    device.synchronize()
    return (time.perf_counter() - started) * 1e3


def ceilings(device: Device, *, tiny: bool) -> dict[str, float]:
    """Peak rates of this device with torch's own calls: a large copy (bytes read and written), a bf16 product."""
    where, size = device.torch_device, 64 if tiny else 8192
    source = torch.randn(1 << (16 if tiny else 30)).to(where, torch.bfloat16)
    target = torch.empty_like(source)
    left, right = torch.randn(2, size, size).to(where, torch.bfloat16).unbind(0)
    return {
        "copy_gb_s": 2 * source.nbytes / call_ms(device, [partial(target.copy_, source)]) / 1e6,
        "bf16_matmul_tflop_s": 2 * size**3 / call_ms(device, [partial(torch.mm, left, right)]) / 1e9,
    }
