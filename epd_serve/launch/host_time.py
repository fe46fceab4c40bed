"""CPU time that requests cost besides their stages: of the gateway, of who asks, and of instances that talk.

An instance's own work for a request is on its way to the first token, so profiles have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.types import Record, Sample
from epd_serve.cost.profile import HostTime

_PROCESS, _GATEWAY = "cpu_s:", "proxy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Of one measurement.

    Attributes:
        side: of the square images that were sent, one with each request; 0: none.
        wall_s: of all of it; gateway_s, instances_s, client_s: CPU seconds, the last of the process that asked.
    """

    records: list[Record]
    side: int
    wall_s: float
    gateway_s: float
    instances_s: float
    client_s: float

    @classmethod
    def of(cls, run: RunDirectory, side: int) -> Answers:
        """Raises ValueError unless all were answered with some tokens."""
        records = run.records()
        failed = [one.detail or "answers of one token" for one in records if len(one.token_times_s) < 3]
        if failed or len(records) < run.settings.num_requests:
            raise ValueError(failed[0] if failed else "not all requests have ended")
        (segment,) = run.segments()
        at = {one.phase: _cpu_s(one) for one in run.samples()}
        gateway_s, instances_s = (end - begin for begin, end in zip(at["before"], at["after"], strict=True))
        return cls(
            records=records,
            side=side,
            wall_s=segment.wall_s,
            gateway_s=gateway_s,
            instances_s=instances_s,
            client_s=segment.cpu_s,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens or 0 for one in self.records)

    @property
    def num_output_tokens(self) -> int:
        return sum(one.num_output_tokens for one in self.records)

    @property
    def num_images(self) -> int:
        return len(self.records) if self.side else 0


def _cpu_s(sample: Sample) -> tuple[float, float]:
    """That the gateway and all other processes of the deployment have spent by then."""
    found = {
        name.removeprefix(_PROCESS): s for name, s in sample.devices.get("cpu", {}).items() if _PROCESS in name
    }
    gateway_s = found.pop(_GATEWAY, 0.0)
    return gateway_s, sum(found.values())


def host_times(measured: Sequence[Answers]) -> tuple[HostTime, HostTime]:
    """Of the gateway and of who asks. What they do as time goes by, asked or not, is in neither."""
    rows = [
        [len(one.records), one.num_images, one.num_images * one.side**2, one.num_output_tokens, one.wall_s]
        for one in measured
    ]

    def fitted(seconds: list[float]) -> HostTime:
        request_s, image_s, pixel_s, token_s, _ = fit(rows, seconds)
        return HostTime(request_s=request_s, image_s=image_s, pixel_s=pixel_s, token_s=token_s)

    return fitted([one.gateway_s for one in measured]), fitted([one.client_s for one in measured])


def split_times(apart: Sequence[Answers], whole: Sequence[Answers]) -> tuple[float, float, float]:
    """What instances that talk cost more than a single one under the same loads: CPU seconds for each request,
    prompt token and image."""
    rows = [[len(one.records), one.num_prompt_tokens, one.num_images] for one in apart]
    more = [one.instances_s - other.instances_s for one, other in zip(apart, whole, strict=True)]
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
