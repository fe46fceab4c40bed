"""Measured rates of an instance's stages, and lengths of its answers and prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import SequenceState
from epd_serve.types import Stage, StageRate

#: After so many seconds without work a rate is old: the machine may be another by now.
_FRESH_S = 60.0
#: With fewer prompt tokens a step's time is its own, not that of the tokens: a probe's, or that of what the cache
#: does not hold of a prompt.
_FEWEST_TOKENS = 16
#: Of a new sequence in the mean of output lengths, of a new prompt in that of tokens per character.
_GAIN = 0.05


class StageRates:
    """Rates of the stages and lengths of answers and prompts.

    Each method is called on one thread only; readers may see a value that is one batch old.

    Attributes:
        mean_output_tokens: of sequences that ended here; 0: none has.
        tokens_per_character: of prompts, media apart; 0: there was none.
        busy_s: seconds that each stage has computed, by its letter; a step with prompts counts as prefill.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fits = {stage: RateFit() for stage in Stage}
        self._measured_s = dict.fromkeys(Stage, 0.0)
        self.mean_output_tokens = 0.0
        self.tokens_per_character = 0.0
        self.busy_s = {stage.value: 0.0 for stage in Stage}

    def report(self) -> dict[str, StageRate]:
        """By stage, without those that have not worked."""
        now = self._clock()
        return {
            stage.value: StageRate(fit.base_s, fit.unit_s, is_fresh=now - self._measured_s[stage] < _FRESH_S)
            for stage, fit in self._fits.items()
            if fit.weight
        }

    def encoded(self, num_pixels: int, seconds: float) -> None:
        """A batch of images kept the encoder busy, on the tower's thread."""
        self.busy_s[Stage.ENCODE] += seconds
        self._fits[Stage.ENCODE].observe(num_pixels, seconds)
        self._measured_s[Stage.ENCODE] = self._clock()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """A step that has just ended, on the engine's thread.

        A step without prompts is one of decodes; of a mixed one, what its decodes take is not the prompts'.
        """
        num_decodes = len(output.decodes)
        stage = Stage.PREFILL if output.prefills else Stage.DECODE
        self.busy_s[stage] += seconds
        units = num_decodes
        if stage is Stage.PREFILL:
            units = output.num_tokens - num_decodes
            seconds -= self._fits[Stage.DECODE].unit_s * num_decodes
        if stage is Stage.DECODE or units >= _FEWEST_TOKENS:
            self._fits[stage].observe(units, seconds)
            self._measured_s[stage] = self._clock()
        for sequence in output.decodes:
            if sequence.state is SequenceState.FINISHED:
                self.mean_output_tokens = _towards(self.mean_output_tokens, len(sequence.output_ids))

    def prompted(self, num_characters: int, num_tokens: int) -> None:
        """A prompt's text became so many tokens, media apart, on the thread that tokenises."""
        if num_characters:
            self.tokens_per_character = _towards(self.tokens_per_character, num_tokens / num_characters)


def _towards(mean: float, value: float) -> float:
    return mean + _GAIN * (value - mean) if mean else float(value)


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
    ``weight`` is that of the batches so far; 0: there was none.
    """

    base_s: float = 0.0
    unit_s: float = 0.0
    weight: float = 0.0
    _units: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """One batch of ``units`` > 0 took ``seconds`` > 0; others are ignored."""
        if units <= 0 or seconds <= 0:
            return
        if self.weight > 2:
            expected = self.base_s + self.unit_s * units
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        self.weight = _MEMORY * self.weight + 1
        self._units = _MEMORY * self._units + units
        self._seconds = _MEMORY * self._seconds + seconds
        self._squares = _MEMORY * self._squares + units * units
        self._products = _MEMORY * self._products + units * seconds
        mean_units, mean_s = self._units / self.weight, self._seconds / self.weight
        variance = self._squares / self.weight - mean_units**2
        if variance > (_SPREAD * mean_units) ** 2:
            slope = (self._products / self.weight - mean_units * mean_s) / variance
        else:
            slope = (mean_s - self.base_s) / mean_units
        self.unit_s = min(max(slope, _LEAST_UNIT_SHARE * mean_s / mean_units), mean_s / mean_units)
        self.base_s = max(mean_s - self.unit_s * mean_units, 0.0)
