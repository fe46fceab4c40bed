"""Figures of live requests, of which some may have failed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.deployed import Timing


def summary(outcomes: Sequence[Timing | Exception], lengths: Sequence[int]) -> dict[str, Any]:
    """Seconds of those that were answered, and how many were not; ``lengths``: tokens of each answer.

    Raises RuntimeError where none was answered.
    """
    answered = [(one, num) for one, num in zip(outcomes, lengths, strict=True) if isinstance(one, Timing)]
    errors = [str(one) or repr(one) for one in outcomes if isinstance(one, Exception)]
    if not answered:
        raise RuntimeError(f"none of {len(errors)} requests was answered: {errors[:1]}")
    return {
        "latency_s": spread([one.tokens_s[-1] for one, _ in answered]),
        "ttft_s": spread([one.first_s for one, _ in answered]),
        "tpot_s": spread([tpot_s(one, num) for one, num in answered]),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": fmean(values), "p50": float(p50), "p99": float(p99)}


def tpot_s(timing: Timing, num_tokens: int) -> float:
    """Seconds for each token of an answer: an event may carry several."""
    return (timing.tokens_s[-1] - timing.first_s) / (num_tokens - 1)


def ratios(without: dict[str, Any], switched: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times lower each figure is with switches."""
    return {
        name: {kind: without[name][kind] / switched[name][kind] for kind in without[name]}
        for name in ("latency_s", "ttft_s", "tpot_s")
    }
