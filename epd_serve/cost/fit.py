"""A stage's rate from its batches, while it works."""

from __future__ import annotations

from dataclasses import dataclass

#: What a batch weighs after the next one: about the last twenty count.
_MEMORY = 0.95
#: A batch counts as so many times longer or shorter than expected at most: what else a machine does is noise.
_OUTLIER = 4.0
#: Relative spread of sizes below which they cannot tell the two parts of a rate apart.
_SPREAD = 0.05
#: The least part of a batch's time that goes by its size.
_LEAST_UNIT_SHARE = 0.02


@dataclass(slots=True)
class RateFit:
    """``seconds = base_s + unit_s * units`` by least squares over batches, older ones counting less.

    Neither part is negative. Where all batches are of one size, the base stays as it was; the rest goes by size.
    """

    base_s: float = 0.0
    unit_s: float = 0.0
    _weight: float = 0.0
    _units: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def observe(self, units: float, seconds: float) -> None:
        """One batch of ``units`` > 0 took ``seconds`` > 0; others are ignored."""
        if units <= 0 or seconds <= 0:
            return
        if self._weight > 2:
            expected = self.base_s + self.unit_s * units
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        self._weight = _MEMORY * self._weight + 1
        self._units = _MEMORY * self._units + units
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + units * units
        self._products = _MEMORY * self._products + units * seconds
        self._solve()

    def _solve(self) -> None:
        mean_units, mean_s = self._units / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_units**2
        if variance > (_SPREAD * mean_units) ** 2:
            slope = (self._products / self._weight - mean_units * mean_s) / variance
        else:
            slope = (mean_s - self.base_s) / mean_units
        self.unit_s = min(max(slope, _LEAST_UNIT_SHARE * mean_s / mean_units), mean_s / mean_units)
        self.base_s = max(mean_s - self.unit_s * mean_units, 0.0)
