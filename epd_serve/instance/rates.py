"""The seconds that an instance's stages take, measured while they work (any thread)."""

from __future__ import annotations

from collections.abc import Callable

from epd_serve.cost.fit import RateFit
from epd_serve.request import SequenceState
from epd_serve.sched.language import ScheduleOutput
from epd_serve.types import Stage, StageRate

#: After so many seconds without work a rate is old: the machine may be another by now.
_FRESH_S = 60.0
#: With fewer prompt tokens a step's time is its own, not that of the tokens: a probe's, or that of what the cache
#: does not hold of a prompt.
_FEWEST_TOKENS = 16
#: Of a new sequence in the mean of output lengths, of a new prompt in that of tokens per character.
_GAIN = 0.05


class StageRates:
    """Rates of the stages and lengths of answers and prompts, for :class:`~epd_serve.protocol.wire.Load`.

    Each method is called on one thread only; readers may see a value that is one batch old.

    Attributes:
        mean_output_tokens: of sequences that ended here; 0: none has.
        tokens_per_character: of prompts, media apart; 0: there was none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fits = {stage: RateFit() for stage in Stage}
        self._measured_s = dict.fromkeys(Stage, 0.0)
        self.mean_output_tokens = 0.0
        self.tokens_per_character = 0.0

    def report(self) -> dict[str, StageRate]:
        """By stage, without those that have not worked."""
        now = self._clock()
        return {
            stage.value: StageRate(fit.base_s, fit.unit_s, is_fresh=now - self._measured_s[stage] < _FRESH_S)
            for stage, fit in self._fits.items()
            if fit.is_known
        }

    def encoded(self, num_pixels: int, seconds: float) -> None:
        """A batch of images kept the encoder busy, on the tower's thread."""
        self._observe(Stage.ENCODE, num_pixels, seconds)

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """A step that has just ended, on the engine's thread.

        A step without prompts is one of decodes; of a mixed one, what its decodes take is not the prompts'.
        """
        num_decodes = len(output.decodes)
        if output.prefills:
            num_tokens = output.num_tokens - num_decodes
            if num_tokens >= _FEWEST_TOKENS:
                seconds -= self._fits[Stage.DECODE].unit_s * num_decodes
                self._observe(Stage.PREFILL, num_tokens, seconds)
        else:
            self._observe(Stage.DECODE, num_decodes, seconds)
        for sequence in output.decodes:
            if sequence.state is SequenceState.FINISHED:
                self.mean_output_tokens = _towards(self.mean_output_tokens, len(sequence.output_ids))

    def prompted(self, num_characters: int, num_tokens: int) -> None:
        """A prompt's text became so many tokens, media apart, on the thread that tokenises."""
        if num_characters:
            self.tokens_per_character = _towards(self.tokens_per_character, num_tokens / num_characters)

    def _observe(self, stage: Stage, units: int, seconds: float) -> None:
        self._fits[stage].observe(units, seconds)
        self._measured_s[stage] = self._clock()


def _towards(mean: float, value: float) -> float:
    return mean + _GAIN * (value - mean) if mean else float(value)
