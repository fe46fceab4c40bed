"""Timing on a GPU: calls captured in one CUDA graph, so that the host's speed does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

_ROUNDS = 15


def graph_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of one call: all are captured in one graph, and the median of its replays is shared out.

    Give calls over different data, together larger than the L2 cache, where the data comes from memory in service.
    """
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
    return replay_ms(graph.replay) / len(calls)


def replay_ms(replay: Callable[[], object]) -> float:
    """The median time of a call that keeps the GPU busy for longer than the host needs to make it."""
    replay()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def host_ms(call: Callable[[], object]) -> float:
    """Milliseconds on the clock of one call, until the GPU is done."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def ceilings(where: torch.device) -> dict[str, float]:
    """Peak rates of this GPU with torch's own calls: a 2 GiB copy, and a bf16 matrix product on random data."""
    return {"copy_gb_s": _copy_gb_s(where, 1 << 30), "bf16_matmul_tflop_s": _matmul_tflop_s(where, 8192)}


def _copy_gb_s(where: torch.device, numbers: int) -> float:
    """Bytes read and written a second."""
    source = torch.empty(numbers, dtype=torch.bfloat16, device=where).normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / graph_ms([partial(target.copy_, source)]) / 1e6


def _matmul_tflop_s(where: torch.device, size: int) -> float:
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=where).unbind(0)
    return 2 * size**3 / graph_ms([partial(torch.mm, left, right)]) / 1e9
