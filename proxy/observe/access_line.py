"""A line of the access log."""

from __future__ import annotations

import msgspec


class StageLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stage at one instance; ``start_ms`` counts from the request's arrival."""

    stage: str
    start_ms: float
    ms: float
    instance: str = ""
    item: str = ""
    feature: str = ""
    failed: bool = False


class Line(msgspec.Struct, frozen=True):
    """A request, as it is logged. Times are in milliseconds. What is not known is null."""

    time: str
    request_id: str
    trace_id: str
    key: str | None
    endpoint: str
    model: str | None
    modality: str
    images: int
    pixels: tuple[int, ...]
    media_bytes: int
    stream: bool
    status: int
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float
    queue_ms: float
    prefill: str | None
    decode: str | None
    stages: list[StageLine]
    retries: int
    continuations: int
    encode_retries: int
