"""The two engines compute the same, of prompts in words and of pictures.

Videos are held against transformers alone: vLLM reads and samples them by its own rules.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fleet import deployed
from vllm_runs import Tokens, ask_all

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def alike(native: Tokens, vllm: Tokens) -> bool:
    """The same tokens; the two show those that are parts of a character differently, with the same numbers."""
    return len(native) == len(vllm) and all(
        abs(a - b) < 0.01 and (one == other or not (one.isascii() and other.isascii() and one and other))
        for (one, a), (other, b) in zip(native, vllm, strict=True)
    )


async def test_native_instances_give_the_tokens_of_vllm_in_float32(
    model: Path, asked: list[dict[str, Any]], expected: list[Tokens]
) -> None:
    still = [
        i
        for i, one in enumerate(asked)
        if "video_url" not in str(one["messages"]) and "mm_processor_kwargs" not in one
    ]
    async with deployed("E-P-D", model) as deployment:
        found = await asyncio.to_thread(ask_all, deployment.gateway_url, [asked[i] for i in still])
    answers = dict(zip(still, found, strict=True))
    wrong = [i for i, answer in answers.items() if not alike(answer, expected[i])]
    assert not wrong, [(i, answers[i], expected[i]) for i in wrong]
