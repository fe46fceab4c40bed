"""Several steps of the same decodes, taken together: how long the first so many of them take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from msgspec.structs import replace

from epd_serve.cost.profile import Profile
from epd_serve.sched.budget import StepWork
from epd_serve.sched.language import ScheduleOutput

_EPSILON = 1e-9


class StepRun:
    """``length`` steps that begin with ``output``. Each decode's context grows by one token a step.

    Attributes:
        num_applied: how many of them sequences and pool know of already.
        compute, bandwidth: of the device's peak, the parts that the steps use.
    """

    __slots__ = ("_lines", "_work", "bandwidth", "compute", "length", "num_applied", "output")

    def __init__(self, profile: Profile, output: ScheduleOutput, length: int) -> None:
        work = StepWork.of(
            [sequence.num_tokens for sequence in output.decodes],
            [(sequence.num_computed, count) for sequence, count in output.prefills],
        )
        beside_s = profile.loop_s + profile.stream_s * len(output.decodes) if output.decodes else 0.0
        if profile.split_token_s:
            beside_s += profile.split_token_s * sum(n for sequence, n in output.prefills if sequence.hand_off)
        self.output = output
        self._work = work
        self.num_applied = 0
        # (seconds of the first step, what each further one takes longer)
        self._lines = [
            (
                beside_s
                + line.seconds(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs),
                line.context_s * len(output.decodes),
            )
            for line in (profile.step if output.prefills else profile.decode_lines(len(output.decodes)))
        ]
        self.length = self._uniform(length)
        first_s = max(first for first, _ in self._lines)
        if profile.kind == "analytic" and len(self._lines) == 2:
            launch_s = profile.step[0].base_s
            self.compute = profile.compute_share * (self._lines[0][0] - launch_s) / first_s
            self.bandwidth = profile.bandwidth_share * (self._lines[1][0] - launch_s) / first_s
        else:
            self.compute = self.bandwidth = 1.0

    def _uniform(self, length: int) -> int:
        """Return how many of the first steps have the same largest line: lines cross once at most."""
        if length == 1 or len(self._lines) == 1:
            return length
        longest = max(self._lines)
        if all(longest[0] + longest[1] * (length - 1) >= a + b * (length - 1) for a, b in self._lines):
            return length
        return bisect_right(
            range(1, length + 1),
            0,
            key=lambda count: any(
                longest[0] + longest[1] * (count - 1) < a + b * (count - 1) for a, b in self._lines
            ),
        )

    def total_s(self, count: int) -> float:
        """Return the seconds of the first ``count`` steps."""
        first, more = max(self._lines)
        return count * first + more * count * (count - 1) / 2

    def steps(self) -> Iterator[tuple[StepWork, float]]:
        """The work and the seconds of each."""
        first, more = max(self._lines)
        work, num = self._work, len(self.output.decodes)
        for i in range(self.length):
            yield replace(work, decode_context=work.decode_context + i * num) if i else work, first + more * i

    def steps_within(self, seconds: float) -> int:
        """Whole steps that are over after so many seconds, less than all of them."""
        seconds += _EPSILON
        return bisect_right(range(1, self.length), seconds, key=self.total_s)
