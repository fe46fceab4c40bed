"""The result of a run under the names that ``vllm bench serve --save-result --save-detailed`` uses.

Its conventions are kept: latencies begin with the send, TPOT of requests with one token is left out, a failed
request has 0 in every list. ``request_goodput`` counts both limits of the run's SLO, and TTFT from the *scheduled*
time. What vLLM does not have stands under ``epd_serve``.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from epd_serve.bench.results import MS, Measured, public_settings
from epd_serve.bench.types import Distribution, Record

_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = ("p75", "p90", "p95", "p99")


def vllm_result(measured: Measured) -> dict[str, Any]:
    """A run's figures under the names that vLLM's own benchmark uses, for ``result.json``."""
    settings, total, records = measured.settings, measured.summary.total, measured.records
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(settings.created_unix_s)),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": settings.label or None,
        "model_id": settings.model,
        "tokenizer_id": settings.model,
        "num_prompts": settings.num_requests,
        "request_rate": "inf" if settings.rate is None else settings.rate,
        "burstiness": _burstiness(settings.arrivals),
        "max_concurrency": settings.max_concurrency,
        "duration": total.duration_s,
        "completed": total.num_succeeded,
        "failed": total.num_failed,
        "total_input_tokens": total.total_input_tokens,
        "total_output_tokens": total.total_output_tokens,
        "request_throughput": total.request_throughput,
        "request_goodput": total.goodput,
        "output_throughput": total.output_token_throughput,
        "total_token_throughput": total.total_token_throughput,
        "input_lens": [record.num_prompt_tokens or 0 for record in records],
        "output_lens": [record.num_output_tokens if record.succeeded else 0 for record in records],
        "ttfts": [_of_success(record, record.ttft_s) for record in records],
        "itls": [record.itl_s if record.succeeded else [] for record in records],
        "latencies": [_of_success(record, record.e2el_s) for record in records],
        "start_times": [record.sent_s or 0.0 for record in records],
        "queue_times": [record.slot_wait_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [_error(record) for record in records],
        "max_output_tokens_per_s": _most_tokens_in_a_second(measured),
        "max_concurrent_requests": total.max_concurrency,
        "rtfx": 0.0,
    }
    for name in _LATENCIES:
        result |= _latency(name, total.figures.get(name))
    result["epd_serve"] = {
        "settings": public_settings(settings),
        "summary": msgspec.to_builtins(measured.summary),
    }
    return result


def _latency(name: str, of: Distribution | None) -> dict[str, float]:
    """0 where nothing was measured, as vLLM has it."""
    values = {"mean": 0.0, "median": 0.0, "std": 0.0, **dict.fromkeys(_PERCENTILES, 0.0)}
    if of is not None:
        values = {statistic: MS * getattr(of, statistic) for statistic in values}
    return {f"{statistic}_{name}_ms": value for statistic, value in values.items()}


def _burstiness(arrivals: str) -> float:
    """vLLM's: the shape of the gamma distribution, 1 of a Poisson process."""
    kind, *values = arrivals.split(":")
    if kind == "gamma" and values:
        return float(values[-1])
    return 1.0


def _of_success(record: Record, value: float | None) -> float:
    return value if record.succeeded and value is not None else 0.0


def _error(record: Record) -> str:
    return "" if record.failure is None else f"{record.failure}: {record.detail}".rstrip(": ")


def _most_tokens_in_a_second(measured: Measured) -> float:
    sent = [record.sent_s for record in measured.records if record.succeeded and record.sent_s is not None]
    if not sent:
        return 0.0
    begin = min(sent)
    counts = Counter(
        int(at - begin) for record in measured.records if record.succeeded for at in record.token_times_s
    )
    return float(max(counts.values(), default=0))
