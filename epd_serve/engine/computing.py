"""Torch-free protocols of the parts that compute steps, and the result of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from epd_serve.protocol.wire import TokenLogprob
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence

#: Placeholder for a token that cannot be chosen because the logits are NaN.
NO_TOKEN = -1
#: Placeholder for the token of a sequence whose request forbids every token.
ALL_FORBIDDEN = -2


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: TokenLogprob | None = None


#: The tokens of a step: one per sequence, or the first tokens of all ``n`` choices after a prompt's last chunk.
SampledTokens = list[tuple[Sequence, list[SampledToken]]]


class LaunchedStep(Protocol):
    """A step on the device. Call ``sample``, then ``read``."""

    def sample(self) -> None:
        """Launch the choice of tokens; all earlier tokens must be known."""
        ...

    def read(self) -> SampledTokens:
        """Wait for the step and return its tokens."""
        ...


class Runner(Protocol):
    """Turns a schedule into a step of the language model."""

    def activate(self) -> None:
        """Make its device current for this thread, which will launch steps."""
        ...

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Any],
        on_layer: Callable[[int], None] | None = None,
        before: Any = None,
    ) -> LaunchedStep:
        """Launch the computation of the scheduled tokens without waiting for it.

        Args:
            features_by_hash: features of all media that overlap the chunks.
            on_layer: called on this thread once the work that writes a layer's KV is launched.
            before: the step whose tokens replace the placeholders.
        """
        ...
