"""CPU time of instances over one transport beyond that over another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.types import Record, Sample
from epd_serve.cost.least_squares import fit

_PROCESS, _GATEWAY = "cpu_s:", "cpu_s:proxy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """CPU time spent on some requests; ``cpu_s``: of all processes of the deployment but the gateway."""

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
    """CPU seconds of ``measured`` beyond ``base``, at equal loads, for each request, prompt token and image."""
    rows = [[one.num_requests, one.num_prompt_tokens, one.num_images] for one in measured]
    more = [one.cpu_s - other.cpu_s for one, other in zip(measured, base, strict=True)]
    request_s, token_s, image_s = fit(rows, more)
    return request_s, token_s, image_s
