"""Measured rates of an instance's stages, and lengths of its answers and prompts."""

from __future__ import annotations

from collections.abc import Callable

from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import SequenceState
from epd_serve.transfer.grouping import TimeEstimate
from epd_serve.types import Stage, StageRate

#: After so many seconds without work a rate is old: the machine may be another by now.
_FRESH_S = 60.0
#: With fewer prompt tokens a step's time is its own, not that of the tokens: a probe's, or that of what the cache
#: does not hold of a prompt.
_FEWEST_TOKENS = 16
#: Weight of a new sequence in the mean of output lengths, of a new prompt in that of tokens per character.
_GAIN = 0.05
#: What a batch weighs after the next one: about the last twenty count.
_MEMORY = 0.95
#: A batch counts as so many times longer or shorter than expected at most: what else a machine does is noise.
_OUTLIER = 4.0


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
        self._fits = {stage: TimeEstimate(memory=_MEMORY, outlier=_OUTLIER) for stage in Stage}
        self._measured_s = dict.fromkeys(Stage, 0.0)
        self.mean_output_tokens = 0.0
        self.tokens_per_character = 0.0
        self.busy_s = {stage.value: 0.0 for stage in Stage}

    def report(self) -> dict[str, StageRate]:
        """By stage, without those that have not worked."""
        now = self._clock()
        return {
            stage.value: StageRate(fit.base_s, fit.slope_s, is_fresh=now - self._measured_s[stage] < _FRESH_S)
            for stage, fit in self._fits.items()
            if fit.is_known
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
            seconds -= self._fits[Stage.DECODE].slope_s * num_decodes
        if seconds > 0 and (stage is Stage.DECODE or units >= _FEWEST_TOKENS):
            self._fits[stage].observe(units, seconds)
            self._measured_s[stage] = self._clock()
        for sequence in output.decodes:
            if sequence.state is SequenceState.FINISHED:
                self.mean_output_tokens = _move_towards(self.mean_output_tokens, len(sequence.output_ids))

    def prompted(self, num_characters: int, num_tokens: int) -> None:
        """A prompt's text became so many tokens, media apart, on the thread that tokenises."""
        if num_characters:
            self.tokens_per_character = _move_towards(self.tokens_per_character, num_tokens / num_characters)


def _move_towards(mean: float, value: float) -> float:
    return mean + _GAIN * (value - mean) if mean else float(value)
