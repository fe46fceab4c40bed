"""Requests as instances get them, and their answers apart from what depends on the batch that they were in."""

from __future__ import annotations

import json
import re
from typing import Any

from pictures import noise

from epd_serve.protocol import wire
from epd_serve.types import SamplingParams

PICTURE = noise(1)
REF = wire.MediaRef("a1" * 32, PICTURE.width, PICTURE.height)
Frame = tuple[int, list[int], bytes]
_CACHED = re.compile(rb',"prompt_tokens_details":\{[^}]*\}')


def request(kind: Any = "chat", image: bool = False, **sampling: Any) -> wire.PrefillRequest:
    parts = [wire.Part(type="image")] * image + [wire.Part(type="text", text="What is this apple?")]
    return wire.PrefillRequest(
        request_id="r",
        output=wire.OutputOptions(kind, "r", 0, "tiny", stream=True, include_usage=True, continuous_usage=True),
        sampling=SamplingParams(**({"seed": 7, "max_tokens": 21, "ignore_eos": True} | sampling)),
        items=[REF] * image,
        messages=[wire.ChatMessage(role="user", content=parts)] if kind == "chat" else None,
        prompt=None if kind == "chat" else "apple banana cherry " * 3,
    )


def without_logprobs(answer: list[Frame]) -> list[Any]:
    """Without what depends on other requests: log-probabilities, by the rounding of other batches, and the tokens
    that were in the prefix cache."""
    told = []
    for choice, ids, event in answer:
        event = _CACHED.sub(b"", event)
        parsed = json.loads(event[6:]) if choice == 0 else event
        if choice == 0 and (logprobs := parsed["choices"][0]["logprobs"]):
            if "content" in logprobs:
                assert all(token["logprob"] <= 0 for token in logprobs["content"])
                parsed["choices"][0]["logprobs"] = [token["bytes"] for token in logprobs["content"]]
            else:
                assert all(value <= 0 for value in logprobs.pop("token_logprobs"))
                logprobs["top_logprobs"] = [list(top) for top in logprobs["top_logprobs"]]
        told.append((choice, ids, parsed))
    return told
