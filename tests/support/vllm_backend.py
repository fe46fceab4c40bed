"""A vLLM backend of the gateway, and its requests, for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from epd_serve.backends.vllm import VllmTarget
from epd_serve.backends.vllm_command import Connectors
from epd_serve.protocol.openai.generation import ChatCompletionRequest, CompletionRequest, GenerationRequest
from epd_serve.protocol.wire import MediaRef, PrefillRequest
from epd_serve.types import Role


def target(role: str, **fields: Any) -> VllmTarget:
    used = Connectors(**fields)
    return VllmTarget(role=Role.parse(role), device="cpu", dtype="float32", model_path="/model", connectors=used)


def request(
    body: dict[str, Any],
    num_items: int = 0,
    kinds: tuple[type[GenerationRequest], type[GenerationRequest]] = (ChatCompletionRequest, CompletionRequest),
    generated: list[int] | None = None,
) -> PrefillRequest:
    """As the gateway makes it of a client's."""
    parsed = kinds["prompt" in body].parse(msgspec.json.encode(body))
    prompts = parsed.prompts() if "prompt" in body else [None]
    return PrefillRequest(
        request_id="r-1",
        output=parsed.output(id="r", created=5, model="m"),
        sampling=parsed.sampling(7),
        items=[MediaRef(mm_hash=f"h{n}", width=2, height=2) for n in range(num_items)],
        messages=parsed.chat(),
        prompt=prompts[0],
        prompting=parsed.prompting(),
        generated=generated or [],
    )
