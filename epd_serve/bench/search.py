"""The highest rate that still attains: doubling, then bisection. Knows nothing of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class GoodputSearch:
    """Asks for one rate after the other; each is tried once.

    It presumes that a server which attains at a rate attains at every lower one. The answer is then within
    ``precision`` (relative) of the highest such rate, as far as that lies in ``[lowest, highest]``.

    Attributes:
        start: the first rate to be tried, requests/s.
        attained, missed: the highest rate known to attain, the lowest known not to; None while there is none.
        tried: all rates so far and whether each attained.
    """

    start: float
    lowest: float
    highest: float
    precision: float = 0.05
    attained: float | None = None
    missed: float | None = None
    tried: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest:
            raise ValueError(
                f"the search needs 0 < lowest <= start <= highest, not {self.lowest:g}, {self.start:g} and "
                f"{self.highest:g} requests/s"
            )
        if not 0 < self.precision < 1:
            raise ValueError(f"precision is a share between 0 and 1, as in 0.05; not {self.precision:g}")

    def next_rate(self) -> float | None:
        """The next rate to try; None when the search is over."""
        if self.attained is None and self.missed is None:
            return self.start
        if self.missed is None:
            assert self.attained is not None
            return None if self.attained >= self.highest else min(2 * self.attained, self.highest)
        if self.attained is None:
            return None if self.missed <= self.lowest else max(self.missed / 2, self.lowest)
        if self.missed <= self.attained * (1 + self.precision):
            return None
        return (self.attained + self.missed) / 2

    def tell(self, rate: float, *, attained: bool) -> None:
        """Record whether a rate attained.

        Where noise contradicts an earlier answer, no bound moves across the other.
        """
        self.tried.append((rate, attained))
        if attained:
            if (self.attained is None or rate > self.attained) and (self.missed is None or rate < self.missed):
                self.attained = rate
        elif (self.missed is None or rate < self.missed) and (self.attained is None or rate > self.attained):
            self.missed = rate


def parse_rates(text: str) -> list[float]:
    """``FROM:TO:STEP`` (both ends included) or a list as in ``1,2,4``, ascending and positive.

    Raises ValueError that says what would be right.
    """
    example = "write FROM:TO:STEP as in 1:12:1, or a list as in 1,2,4"
    try:
        if ":" in text:
            begin, end, step = (float(part) for part in text.split(":"))
            if not (begin > 0 and step > 0 and begin <= end < math.inf and step < math.inf):
                raise ValueError
            count = int((end - begin) / step + 1e-9) + 1
            if count > 1000:
                raise ValueError
            return [round(begin + index * step, 9) for index in range(count)]
        rates = [float(part) for part in text.split(",")]
        if not all(0 < rate < math.inf for rate in rates) or rates != sorted(set(rates)):
            raise ValueError
    except ValueError:
        raise ValueError(f"rates {text!r} cannot be read; {example}") from None
    return rates
