"""Whether a workload is still the one that a deployment was planned for (TriInfer, section 4.4, "Redeploy").

Pure: requests come in as they were recorded, and what is said depends on nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import log, sqrt
from statistics import fmean, pvariance
from typing import Any

#: Windows are compared so often while the newer one is filled anew.
_LOOKS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One request: seconds of any clock, and sizes."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_images: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftOptions:
    """Attributes:
    num_requests: in each of the two windows that are compared.
    factor: by which a mean must have grown or shrunk; of the share of requests with images, the odds.
    certainty: standard errors that the change must be away from none.
    """

    num_requests: int = 200
    factor: float = 1.5
    certainty: float = 5.0

    def __post_init__(self) -> None:
        if self.num_requests < 20:
            raise ValueError(f"{self.num_requests} requests tell no drift from chance; take 20 or more")
        if not self.factor > 1 or not self.certainty > 0:
            raise ValueError("a drift's factor must be above 1, and its certainty above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A change of the workload: of what, from where to where; ``at_s`` of the request that showed it."""

    at_s: float
    figure: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.figure} went from {self.before:.3g} to {self.after:.3g}"


class DriftDetector:
    """Compares the newest requests with the first ones since the last drift.

    A figure has drifted when it differs by the options' factor and more surely than by chance. Then the newest
    requests are what the next ones are compared with.
    """

    def __init__(self, options: DriftOptions = DriftOptions()) -> None:
        self.options = options
        self._reference: list[Observed] = []
        self._recent: deque[Observed] = deque(maxlen=options.num_requests)
        self._num_new = 0

    @property
    def recent(self) -> Sequence[Observed]:
        return tuple(self._recent)

    def observe(self, request: Observed) -> list[Drift]:
        """What has drifted with this request; requests come in the order of their times."""
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
        return [
            self._lengths(at_s, "tokens of a prompt", _values(before, "prompt"), _values(after, "prompt")),
            self._lengths(at_s, "tokens of an answer", _values(before, "output"), _values(after, "output")),
            self._share(at_s, _values(before, "image"), _values(after, "image")),
            self._rate(at_s, before, after),
        ]

    def _lengths(self, at_s: float, figure: str, before: list[float], after: list[float]) -> Drift | None:
        """By Welch's statistic of the logarithms: a few giants are no drift."""
        old, new = [log(1 + one) for one in before], [log(1 + one) for one in after]
        error = sqrt((pvariance(old) + pvariance(new)) / len(old))
        change = abs(fmean(new) - fmean(old))
        if change < log(self.options.factor) or change < self.options.certainty * error:
            return None
        return Drift(at_s=at_s, figure=figure, before=fmean(before), after=fmean(after))

    def _share(self, at_s: float, before: list[float], after: list[float]) -> Drift | None:
        old, new, num = fmean(before), fmean(after), len(before)
        both = (old + new) / 2
        error = sqrt(2 * both * (1 - both) / num)
        odds = abs(_log_odds(new, num) - _log_odds(old, num))
        if odds < log(self.options.factor) or abs(new - old) < self.options.certainty * error or new == old:
            return None
        return Drift(at_s=at_s, figure="share of requests with images", before=old, after=new)

    def _rate(self, at_s: float, before: Sequence[Observed], after: Sequence[Observed]) -> Drift | None:
        """As of random arrivals, whose number in some time has a spread like its root; bursts have more."""
        old_s, new_s = (every[-1].at_s - every[0].at_s for every in (before, after))
        if old_s <= 0 or new_s <= 0:
            return None
        change = abs(log(old_s / new_s))
        error = sqrt(_burstiness(before) / len(before) + _burstiness(after) / len(after))
        if change < log(self.options.factor) or change < self.options.certainty * error:
            return None
        num = len(before) - 1
        return Drift(at_s=at_s, figure="requests a second", before=num / old_s, after=num / new_s)


def observed(line: Mapping[str, Any]) -> Observed | None:
    """A line of the gateway's access log; None for a request that was not served, or another line."""
    try:
        prompt, output = line["prompt_tokens"], line["completion_tokens"]
        at_s = datetime.fromisoformat(line["time"]).timestamp()
        if not isinstance(prompt, int) or not isinstance(output, int):
            return None
        return Observed(
            at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output, num_images=int(line["images"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def _values(every: Sequence[Observed], what: str) -> list[float]:
    if what == "prompt":
        return [float(one.num_prompt_tokens) for one in every]
    if what == "output":
        return [float(one.num_output_tokens) for one in every]
    return [float(one.num_images > 0) for one in every]


def _log_odds(share: float, num: int) -> float:
    """Half a request more on both sides, so that none and all have odds, too."""
    with_images = share * num
    return log((with_images + 0.5) / (num - with_images + 0.5))


def _burstiness(every: Sequence[Observed]) -> float:
    """The squared coefficient of variation of the gaps between requests: 1 for random ones, 1 at least."""
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(every)]
    mean = fmean(gaps)
    return max(pvariance(gaps) / mean**2, 1.0) if mean > 0 else 1.0
