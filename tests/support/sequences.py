"""Sequences of an engine, for tests that care about few of their fields."""

from __future__ import annotations

from typing import Any

from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.types import SamplingParams


def sequence(prompt: int, name: str = "s", *, computed: int = 0, output: int = 0, **fields: Any) -> Sequence:
    """A prompt of so many tokens; it runs where some of it is computed or answered."""
    state = SequenceState.RUNNING if output or computed else SequenceState.WAITING
    values: dict[str, Any] = {
        "max_tokens": 100,
        "positions": None,
        "sampling": SamplingParams(seed=0),
        "state": state,
    }
    values |= {"num_computed": computed, "output_ids": [1] * output}
    return Sequence(request_id=name, prompt_ids=[1] * prompt, **values | fields)
