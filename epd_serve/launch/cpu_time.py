"""CPU time that instances take more where they talk over one transport than where they talk over another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.types import Record, Sample

_PROCESS, _GATEWAY = "cpu_s:", "cpu_s:proxy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """On some requests. ``cpu_s``: of the instances, all processes of the deployment but the gateway."""

    num_requests: int
    num_prompt_tokens: int
    num_images: int
    cpu_s: float

    @classmethod
    def on(cls, run: RunDirectory, records: Sequence[Record], num_images: int) -> Spent:
        at = {one.phase: _cpu_s(one) for one in run.samples()}
        return cls(
            num_requests=len(records),
            num_prompt_tokens=sum(one.num_prompt_tokens or 0 for one in records),
            num_images=num_images,
            cpu_s=at["after"] - at["before"],
        )


def _cpu_s(sample: Sample) -> float:
    found = sample.devices.get("cpu", {})
    return sum(seconds for name, seconds in found.items() if name.startswith(_PROCESS) and name != _GATEWAY)


def talk_cpu_s(measured: Sequence[Spent], base: Sequence[Spent]) -> tuple[float, float, float]:
    """CPU seconds for each request, prompt token and image, under the same loads."""
    rows = [[one.num_requests, one.num_prompt_tokens, one.num_images] for one in measured]
    more = [one.cpu_s - other.cpu_s for one, other in zip(measured, base, strict=True)]
    request_s, token_s, image_s = fit(rows, more)
    return request_s, token_s, image_s


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients of sums over columns, none below zero, by least squares."""
    matrix = np.array(rows, dtype=float)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    kept = [column for column in range(len(scale)) if matrix[:, column].any()]
    found = [0.0] * len(scale)
    while kept:
        parts = np.linalg.lstsq((matrix / scale)[:, kept], np.array(values, dtype=float), rcond=None)[0]
        if (parts >= 0).all():
            for column, part in zip(kept, parts, strict=True):
                found[column] = float(part / scale[column])
            break
        del kept[int(parts.argmin())]
    return found
