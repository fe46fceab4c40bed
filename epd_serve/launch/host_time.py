"""CPU time that requests cost a machine besides their stages: of its gateway, its instances and who asks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.types import Record, Sample
from epd_serve.cost.profile import HostTime, Profile

_PROCESS = "cpu_s:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Of one measurement.

    Attributes:
        side: of the square images that were sent, one with each request; 0: none.
        wall_s: of all of it; server_s, client_s: CPU seconds of the deployment's processes, and of the asking one.
    """

    records: list[Record]
    side: int
    wall_s: float
    server_s: float
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
        return cls(
            records=records,
            side=side,
            wall_s=segment.wall_s,
            server_s=at["after"] - at["before"],
            client_s=segment.cpu_s,
        )

    @property
    def num_tokens(self) -> int:
        return sum(one.num_output_tokens for one in self.records)

    @property
    def num_images(self) -> int:
        return len(self.records) if self.side else 0

    def stages_s(self, profile: Profile) -> float:
        """Seconds in which stages computed: one behind the other for a request alone, else all of the time."""
        seconds = 0.0
        for one in self.records:
            num_tokens = one.num_prompt_tokens or 1
            seconds += profile.step_s(num_tokens, 1, 0, num_tokens**2)
            seconds += profile.encode_s([self.side**2]) if self.side else 0.0
            seconds += one.token_times_s[-1] - one.token_times_s[0]
        return min(seconds, self.wall_s)

    def _row(self) -> list[float]:
        return [len(self.records), self.num_images, self.num_images * self.side**2, self.num_tokens]

    def besides(self, known: HostTime) -> float:
        """CPU seconds that it should have cost."""
        parts = known.request_s, known.image_s, known.pixel_s, known.token_s
        return sum(part * count for part, count in zip(parts, self._row(), strict=True))


def _cpu_s(sample: Sample) -> float:
    """That all of the deployment's processes have spent by then."""
    found = sample.devices.get("cpu", {})
    return sum(value for name, value in found.items() if name.startswith(_PROCESS))


def host_times(measured: Sequence[Answers], profile: Profile, threads: int) -> tuple[HostTime, HostTime]:
    """Of the deployment and of who asks, from several loads on a monolithic one."""
    rows = [one._row() for one in measured]

    def fitted(seconds: list[float]) -> HostTime:
        request_s, image_s, pixel_s, token_s = fit(rows, seconds)
        return HostTime(request_s=request_s, image_s=image_s, pixel_s=pixel_s, token_s=token_s)

    server = [one.server_s - threads * one.stages_s(profile) for one in measured]
    return fitted(server), fitted([one.client_s for one in measured])


def split_times(
    measured: Sequence[Answers], profile: Profile, whole: HostTime, threads: int
) -> tuple[float, float, float]:
    """What stages apart cost more than that: CPU seconds for each request, prompt token and image."""
    rows = [
        [len(one.records), sum(record.num_prompt_tokens or 0 for record in one.records), one.num_images]
        for one in measured
    ]
    more = [one.server_s - threads * one.stages_s(profile) - one.besides(whole) for one in measured]
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
