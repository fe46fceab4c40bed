"""The features that a step computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from epd_serve.sched.language import ScheduleOutput, possible_prefills


def with_features(
    output: ScheduleOutput, feature_of: Callable[[str], Tensor | None]
) -> tuple[ScheduleOutput, dict[str, Tensor]]:
    """A step as far as its features can be had, and they, by mm_hash."""
    features: dict[str, Tensor] = {}

    def take(mm_hash: str) -> bool:
        feature = features.get(mm_hash)
        if feature is None:
            feature = feature_of(mm_hash)
        if feature is not None:
            features[mm_hash] = feature
        return feature is not None

    return replace(output, prefills=possible_prefills(output.prefills, take)), features
