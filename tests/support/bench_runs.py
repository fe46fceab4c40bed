"""Runs of the load tester with figures that can be worked out by hand, for what is made of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epd_serve.bench.run import Run
from epd_serve.bench.types import SLO, Failure, Record, RunSettings

#: Of answers: tokens, and seconds between them.
NUM_TOKENS, GAP_S = 5, 0.01


def good(index: int, at_s: float, *, ttft_s: float = 0.1, gap_s: float = GAP_S, **more: Any) -> Record:
    """An answer of five tokens; sent 1 ms late, the role's chunk 20 ms before the first token."""
    sent_s = at_s + 0.001
    first_s = sent_s + ttft_s
    times = [first_s + gap_s * number for number in range(NUM_TOKENS)]
    return Record(
        index=index,
        workload="mine",
        **{"modality": "text", "scheduled_s": at_s, **more},
        sent_s=sent_s,
        first_chunk_s=first_s - 0.02,
        first_token_s=first_s,
        token_times_s=times,
        finish_s=times[-1],
        num_prompt_tokens=50,
        num_output_tokens=NUM_TOKENS,
        has_usage=True,
        finish_reason="length",
        status=200,
        request_id=f"bench-{index}",
        text="abcde",
    )


def failed(index: int, scheduled_s: float) -> Record:
    """A connection that was refused after 5 ms."""
    return Record(
        index=index,
        workload="mine",
        modality="text",
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        finish_s=scheduled_s + 0.005,
        failure=Failure.CONNECT,
        detail="refused",
    )


def measured(
    records: Sequence[Record],
    *,
    label: str = "E-P-D",
    rate: float | None = 2.0,
    arrivals: str = "poisson",
    num_devices: int = 1,
    ttft_ms: float = 2000.0,
    created_unix_s: float = 1.8e9,
) -> Run:
    settings = RunSettings(
        base_url="http://127.0.0.1:1",
        model="demo model",
        workload="custom:mine.jsonl",
        num_requests=len(records),
        seed=0,
        arrivals=arrivals,
        rate=rate,
        slo=SLO(ttft_ms=ttft_ms, tpot_ms=50),
        num_devices=num_devices,
        label=label,
        created_unix_s=created_unix_s,
    )
    return Run(path=Path("gone"), settings=settings, records=records)


def loaded(label: str, rate: float, *, capacity: float, num_devices: int = 1, seconds: float = 10) -> Run:
    """A server that answers so many requests a second, one behind the other; every second one has an image."""
    records, free_s = [], 0.0
    for index in range(int(rate * seconds)):
        at_s = index / rate
        free_s = max(at_s, free_s) + 1 / capacity
        modality = "image" if index % 2 else "text"
        records.append(good(index, at_s, ttft_s=free_s - at_s, modality=modality))
    return measured(records, label=label, rate=rate, arrivals="constant", num_devices=num_devices)
