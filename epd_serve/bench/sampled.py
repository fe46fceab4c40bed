"""Figures of a run from the server's own metrics: cache hits, and the utilisation of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from epd_serve.bench.statistics import wilson
from epd_serve.bench.types import Sample, Share

#: (hits, lookups) by what is cached; of our gateway, and of vLLM.
_CACHES = {
    "media": [
        ("epd_serve_mm_cache_hits_total", "epd_serve_mm_cache_queries_total"),
        ("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
    ],
    "prefix": [("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")],
}


class Sampled(msgspec.Struct, kw_only=True):
    """Attributes:
    cache_hits: share of the lookups during the run that hit, for "media" and "prefix".
    utilisation: mean during the run, 0..1, by device.
    cpu_s: CPU seconds during the run of the server's processes on this machine, by name.
    """

    cache_hits: dict[str, Share]
    utilisation: dict[str, float]
    cpu_s: dict[str, float]


def sampled(samples: Sequence[Sample]) -> Sampled:
    """Sum the growth of each counter from sample to sample; the gap before a run was resumed does not count.

    A counter that fell belongs to a server that was started again; it grew from 0.
    """
    found = Sampled(cache_hits={}, utilisation={}, cpu_s={})
    if len(samples) < 2:
        return found
    last, phases = samples[-1], [one.phase for one in samples]
    for cache, names in _CACHES.items():
        for hits, lookups in names:
            whole = round(_growth([_total(one, lookups) for one in samples], phases))
            if whole > 0:
                part = round(_growth([_total(one, hits) for one in samples], phases))
                found.cache_hits[cache] = wilson(min(part, whole), whole)
    for device in last.devices:
        values = [
            value
            for sample in samples
            if sample.phase != "before"
            and (value := sample.devices.get(device, {}).get("utilisation")) is not None
        ]
        if values:
            found.utilisation[device] = sum(values) / len(values)
    for name in last.devices.get("cpu", {}):
        kind, _, process = name.partition(":")
        if kind == "cpu_s":
            grown = _growth([one.devices.get("cpu", {}).get(name, 0.0) for one in samples], phases)
            found.cpu_s[process] = round(grown, 3)
    return found


def _growth(values: Sequence[float], phases: Sequence[str]) -> float:
    grown = 0.0
    for (before, after), phase in zip(pairwise(values), phases[1:], strict=True):
        if phase != "before":
            grown += after - before if after >= before else after
    return grown


def _total(sample: Sample, name: str) -> float:
    """The sum of a metric over all its labels."""
    return sum(value for key, value in sample.metrics.items() if key.partition("{")[0] == name)
