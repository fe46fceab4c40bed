"""Prompts as a gateway sends them to an instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epd_serve.protocol import wire
from epd_serve.types import SamplingParams


def completion(
    name: str,
    prompt: str | list[int] = "apple",
    *,
    stream: bool = False,
    generated: Sequence[int] = (),
    **sampling: Any,
) -> wire.PrefillRequest:
    """A greedy completion of fixed length, unless ``sampling`` says otherwise."""
    usual = {"seed": 7, "temperature": 0.0, "ignore_eos": True}
    return wire.PrefillRequest(
        request_id=name,
        output=wire.OutputOptions("completion", name, 0, "tiny", stream=stream),
        sampling=SamplingParams(**{**usual, **sampling}),
        items=[],
        prompt=prompt,
        generated=list(generated),
    )
