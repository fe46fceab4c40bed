"""Drawing tokens on a GPU: the kernel that sorts nothing beside the same draws from a sorted vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.accelerator import Target
from benchmarks.gpu_timing import replay_ms
from device.base import Device
from epd_serve.engine.sampling.sampler import Row, Sampler, draw
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams

VOCABULARY = 151936
ROWS = (64, 256)
LIMITS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
}
#: Milliseconds of the draws of the largest batch, of a decode step of about 8.
MOST_MS = 1.0


def measure_sampling(device: Device) -> tuple[dict[str, Any], list[Target]]:
    """Milliseconds of a batch's draws, by rows and limits, with what the host prepares for them."""
    sampler, found, targets = Sampler(device.ops, frozenset()), dict[str, Any](), list[Target]()
    for count in ROWS:
        scores = 4 * torch.randn(count, VOCABULARY, device=device.torch_device)
        for name, limits in LIMITS.items():
            rows = [_row(seed, **limits) for seed in range(count)]
            ours = replay_ms(lambda s=scores, r=rows: sampler._draw_unsorted(s, r))  # type: ignore[misc]
            by_sorting = replay_ms(lambda s=scores, r=rows: draw(s, r))  # type: ignore[misc]
            found[f"{count} rows, {name}"] = {"ours": ours, "sorted": by_sorting}
            if count == max(ROWS):
                targets.append(
                    Target(name=f"draw {count} rows, {name}, ms", measured=ours, required=MOST_MS, at_least=False)
                )
    return found, targets


def _row(seed: int, **limits: Any) -> Row:
    sampling = SamplingParams(temperature=1.0, seed=seed, **limits)
    return Row(Sequence(request_id="r", prompt_ids=[1], sampling=sampling, max_tokens=9, positions=None), 0)
