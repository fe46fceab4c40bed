"""Drift of a workload: whether it still is the one that a deployment was planned for (TriInfer, section 4.4).

Pure: requests come in as they were recorded, and the result depends on nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, pvariance

from epd_serve.config.elastic import DriftConfig

#: Windows are compared so often while the newer one is filled anew.
_LOOKS = 10
#: Standard errors that a change must be away from none.
_CERTAINTY = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One request: seconds of any clock, and sizes."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_images: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A change of the workload: the figure and its means before and after.

    ``at_s`` of the request that showed it.
    """

    at_s: float
    figure: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.figure} went from {self.before:.3g} to {self.after:.3g}"


class DriftDetector:
    """Compares the newest requests with the first ones since the last drift.

    A figure has drifted when it differs by the options' factor and more surely than by chance. From then on, the
    next requests are compared with the newest ones.
    """

    def __init__(self, options: DriftConfig) -> None:
        self.options = options
        self._reference: list[Observed] = []
        self._recent: deque[Observed] = deque(maxlen=options.num_requests)
        self._num_new = 0

    def observe(self, request: Observed) -> list[Drift]:
        """Take a request, in the order of their times; return the figures that have drifted with it."""
        num = self.options.num_requests
        if len(self._reference) < num:
            self._reference.append(request)
            return []
        self._recent.append(request)
        self._num_new += 1
        if len(self._recent) < num or self._num_new < num // _LOOKS:
            return []
        self._num_new = 0
        drifts = [drift for drift in self._compare(request.at_s) if drift is not None]
        if drifts:
            self._reference, self._recent = list(self._recent), deque(maxlen=num)
        return drifts

    def _compare(self, at_s: float) -> list[Drift | None]:
        before, after = self._reference, list(self._recent)
        prompts = ([one.num_prompt_tokens for one in every] for every in (before, after))
        answers = ([one.num_output_tokens for one in every] for every in (before, after))
        images = ([float(one.num_images > 0) for one in every] for every in (before, after))
        return [
            self._lengths(at_s, "tokens of a prompt", *prompts),
            self._lengths(at_s, "tokens of an answer", *answers),
            self._share(at_s, *images),
            self._rate(at_s, before, after),
        ]

    def _lengths(self, at_s: float, figure: str, before: list[int], after: list[int]) -> Drift | None:
        """Compare lengths by Welch's statistic of their logarithms: a few giants are no drift."""
        old, new = [log(1 + one) for one in before], [log(1 + one) for one in after]
        error = sqrt((pvariance(old) + pvariance(new)) / len(old))
        change = abs(fmean(new) - fmean(old))
        if change < log(self.options.factor) or change < _CERTAINTY * error:
            return None
        return Drift(at_s=at_s, figure=figure, before=fmean(before), after=fmean(after))

    def _share(self, at_s: float, before: list[float], after: list[float]) -> Drift | None:
        old, new, num = fmean(before), fmean(after), len(before)
        both = (old + new) / 2
        error = sqrt(2 * both * (1 - both) / num)
        odds = abs(_log_odds(new, num) - _log_odds(old, num))
        if odds < log(self.options.factor) or abs(new - old) < _CERTAINTY * error or new == old:
            return None
        return Drift(at_s=at_s, figure="share of requests with images", before=old, after=new)

    def _rate(self, at_s: float, before: Sequence[Observed], after: Sequence[Observed]) -> Drift | None:
        """Compare the rates.

        The number of random arrivals in a time varies by about its root, that of bursts by more.
        """
        old_s, new_s = (every[-1].at_s - every[0].at_s for every in (before, after))
        if old_s <= 0 or new_s <= 0:
            return None
        change = abs(log(old_s / new_s))
        error = sqrt(_burstiness(before) / len(before) + _burstiness(after) / len(after))
        if change < log(self.options.factor) or change < _CERTAINTY * error:
            return None
        num = len(before) - 1
        return Drift(at_s=at_s, figure="requests a second", before=num / old_s, after=num / new_s)


def _log_odds(share: float, num: int) -> float:
    """The logarithm of the odds, with half a request more on both sides: shares of 0 and 1 have odds, too."""
    with_images = share * num
    return log((with_images + 0.5) / (num - with_images + 0.5))


def _burstiness(every: Sequence[Observed]) -> float:
    """The squared coefficient of variation of the gaps between requests: 1 for random ones, 1 at least."""
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(every)]
    mean = fmean(gaps)
    return max(pvariance(gaps) / mean**2, 1.0) if mean > 0 else 1.0
