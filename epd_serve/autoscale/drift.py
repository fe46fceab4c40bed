"""Detect drift of the load: compare the newest requests with earlier ones (TriInfer, section 4.4)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from math import sqrt
from statistics import fmean, pvariance

import msgspec

#: Requests per compared window, which determines mean chat lengths to about 7 %.
WINDOW = 200
#: Ratio of means that justifies a new plan; closer loads have similar plans.
FACTOR = 1.5
#: Standard errors between two means; chance does not reach this in a year of comparisons.
_CERTAINTY = 5.0
#: Comparisons per window of new requests.
_COMPARISONS = 10


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an access log line that the detector compares."""

    time: str
    status: int
    images: int
    prompt_tokens: int | None
    completion_tokens: int | None
    duration_ms: float

    @property
    def end_s(self) -> float:
        return datetime.fromisoformat(self.time).timestamp() + self.duration_ms / 1e3


class DriftDetector:
    """Compares the newest requests with the first ones after the last drift."""

    def __init__(self) -> None:
        self._before: list[ServedRequest] = []
        self._newest: deque[ServedRequest] = deque(maxlen=WINDOW)
        self._num_new = 0

    def observe(self, request: ServedRequest) -> list[str]:
        """Take finished requests in order; return a sentence for each drifted figure.

        Failed requests are ignored. After a drift the newest requests become the reference.
        """
        if request.status != 200 or not request.prompt_tokens or not request.completion_tokens:
            return []
        if len(self._before) < WINDOW:
            self._before.append(request)
            return []
        self._newest.append(request)
        self._num_new += 1
        if len(self._newest) < WINDOW or self._num_new < WINDOW // _COMPARISONS:
            return []
        self._num_new = 0
        before, after = _figures(self._before), _figures(list(self._newest))
        drifts = []
        for name, old in before.items():
            # by ratio and by Welch's statistic, so that bursts and outliers are not drift
            new, (low, high) = after[name], sorted((fmean(old), fmean(after[name])))
            error = sqrt(pvariance(old) / len(old) + pvariance(new) / len(new))
            if high >= FACTOR * low and high - low > _CERTAINTY * error:
                drifts.append(f"{name} went from {fmean(old):.3g} to {fmean(new):.3g}")
        if drifts:
            self._before, self._newest = list(self._newest), deque(maxlen=WINDOW)
        return drifts


def _figures(requests: Sequence[ServedRequest]) -> dict[str, list[float]]:
    return {
        "prompt tokens": [float(one.prompt_tokens or 0) for one in requests],
        "answer tokens": [float(one.completion_tokens or 0) for one in requests],
        "images per request": [float(one.images) for one in requests],
        "seconds between requests": [b.end_s - a.end_s for a, b in itertools.pairwise(requests)],
    }
