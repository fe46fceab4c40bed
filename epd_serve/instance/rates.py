"""Measured rates of an instance's stages, and mean lengths of its answers and prompts."""

from __future__ import annotations

from collections.abc import Callable

from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import SequenceState
from epd_serve.transfer.grouping import TimeEstimate
from epd_serve.types import Stage, StageRate

#: Seconds without work after which a rate is stale, since the machine's load may have changed.
_FRESH_S = 60.0
#: Ignore steps with fewer prompt tokens (probes, prompts mostly in the cache), dominated by fixed cost.
_FEWEST_TOKENS = 16
#: Weight of a new sequence in the mean output length, and of a new prompt in the mean tokens per character.
_GAIN = 0.05
#: Decay of a batch's weight with each later batch: about the last twenty count.
_MEMORY = 0.95
#: Clip a batch's time to this factor above or below the expected time, to limit noise from other processes.
_OUTLIER = 4.0


class StageRates:
    """Rates of the stages, and mean lengths of answers and prompts.

    Each method is called on only one thread; readers may see values from the batch before.

    Attributes:
        mean_output_tokens: recent mean over finished sequences; 0 before the first.
        tokens_per_character: recent mean over prompts, without media; 0 before the first.
        busy_s: compute seconds by stage letter; a step with prompts counts as prefill.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fits = {stage: TimeEstimate(memory=_MEMORY, outlier=_OUTLIER) for stage in Stage}
        self._measured_s = dict.fromkeys(Stage, 0.0)
        self.mean_output_tokens = 0.0
        self.tokens_per_character = 0.0
        self.busy_s = {stage.value: 0.0 for stage in Stage}

    def report(self) -> dict[str, StageRate]:
        """Return the rates by stage, without stages that have not run yet."""
        now = self._clock()
        return {
            stage.value: StageRate(fit.base_s, fit.slope_s, is_fresh=now - self._measured_s[stage] < _FRESH_S)
            for stage, fit in self._fits.items()
            if fit.is_known
        }

    def encoded(self, num_pixels: int, seconds: float) -> None:
        """Record an encode batch and the time it kept the encoder busy. Call it on the tower's thread."""
        self.busy_s[Stage.ENCODE] += seconds
        self._fits[Stage.ENCODE].observe(num_pixels, seconds)
        self._measured_s[Stage.ENCODE] = self._clock()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        """Record a finished step. Call it on the engine's thread.

        A mixed step counts as prefill, minus the expected time of its decodes.
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
        """Record a prompt's number of text tokens, without media. Call it on the tokenization thread."""
        if num_characters:
            self.tokens_per_character = _move_towards(self.tokens_per_character, num_tokens / num_characters)


def _move_towards(mean: float, value: float) -> float:
    return mean + _GAIN * (value - mean) if mean else float(value)
