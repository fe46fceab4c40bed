"""Drawing tokens on a GPU: the kernel that sorts nothing beside the same draws from a sorted vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_timing import run_ms
from device.base import Device
from epd_serve.engine.sampling.sampler import Row, Sampler, draw
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams

VOCABULARY = 151936
ROWS = (64, 256)
_TINY_VOCABULARY, _TINY_ROWS = 1000, (4,)
LIMITS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
}


def measure_sampling(device: Device, *, tiny: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield milliseconds of a batch's draws, by rows and limits, with what the host prepares for them."""
    sampler = Sampler(device.ops, frozenset())
    for count in _TINY_ROWS if tiny else ROWS:
        scores = 4 * torch.randn(count, _TINY_VOCABULARY if tiny else VOCABULARY).to(device.torch_device)
        for name, limits in LIMITS.items():
            rows = [_row(seed, **limits) for seed in range(count)]
            times = {"sorted": run_ms(device, partial(draw, scores, rows))}
            if device.ops.draw is not None:
                times["ours"] = run_ms(device, partial(sampler._draw_unsorted, scores, rows))
            yield f"{count} rows, {name}", times


def _row(seed: int, **limits: Any) -> Row:
    sampling = SamplingParams(temperature=1.0, seed=seed, **limits)
    return Row(Sequence(request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=9, positions=None), 0)
