"""Files for other programs: vLLM's result and AISBench's tables.

``result.json`` has the names that ``vllm bench serve --save-result --save-detailed`` uses, and its conventions:
latencies begin with the send, TPOT of requests with one token is left out, a failed request has 0 in every list.
``request_goodput`` counts both limits of the run's SLO, and TTFT from the *scheduled* time. What vLLM lacks
stands under ``epd_serve``. AISBench 3.1's rows and keys come first in its files, ours follow::

    performances/<model>/<dataset>.csv            one row for each figure and stage
    performances/<model>/<dataset>.json           totals, with units in the texts
    performances/<model>/<dataset>_details.jsonl  one line for each request
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from epd_serve.bench.plan import Gamma, load_of
from epd_serve.bench.run import Run
from epd_serve.bench.summary import MS
from epd_serve.bench.types import Distribution, Record, Share, Totals


def write_result_files(run: Run) -> None:
    """Write AISBench's files and vLLM's result.json into the run's directory."""
    write_aisbench(run.path, run)
    (run.path / "result.json").write_bytes(msgspec.json.encode(vllm_result(run)) + b"\n")


def file_name(text: str) -> str:
    """Return ``text`` with hyphens for all characters that do not belong into a file's name."""
    return re.sub(r"[^A-Za-z0-9._()-]+", "-", text).strip("-.") or "unnamed"


_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = ("p75", "p90", "p95", "p99")


def vllm_result(run: Run) -> dict[str, Any]:
    """Return a run's figures under the names that vLLM's own benchmark uses."""
    settings, total, records = run.settings, run.total, run.records
    load = load_of(settings)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(settings.created_unix_s)),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": settings.label or None,
        "model_id": settings.model,
        "tokenizer_id": settings.model,
        "num_prompts": settings.num_requests,
        "request_rate": "inf" if settings.rate is None else settings.rate,
        "burstiness": load.shape if isinstance(load, Gamma) else 1.0,
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
        "errors": [f"{record.failure}: {record.detail}" if record.failure else "" for record in records],
        "max_output_tokens_per_s": _most_tokens_in_a_second(run),
        "max_concurrent_requests": total.max_concurrency,
        "rtfx": 0.0,
    }
    for name in _LATENCIES:
        result |= _latency(name, total.figures.get(name))
    result["epd_serve"] = {
        "settings": msgspec.to_builtins(settings),
        "summary": msgspec.to_builtins(run.summary),
    }
    return result


def _latency(name: str, of: Distribution | None) -> dict[str, float]:
    """Return a latency's statistics in ms; 0 where nothing was measured, as vLLM has it."""
    values = {"mean": 0.0, "median": 0.0, "std": 0.0, **dict.fromkeys(_PERCENTILES, 0.0)}
    if of is not None:
        values = {statistic: MS * getattr(of, statistic) for statistic in values}
    return {f"{statistic}_{name}_ms": value for statistic, value in values.items()}


def _of_success(record: Record, value: float | None) -> float:
    return value if record.succeeded and value is not None else 0.0


def _most_tokens_in_a_second(run: Run) -> float:
    begin_s = min((record.sent_s for record in run.records if record.sent_s is not None), default=0.0)
    times = (at_s for record in run.records if record.succeeded for at_s in record.token_times_s)
    return float(max(Counter(int(at_s - begin_s) for at_s in times).values(), default=0))


_STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p99")
_HEADER = ("Performance Parameters", "Stage", "Average", "Min", "Max", "Median", "P75", "P90", "P99", "N")
#: AISBench's names of our figures, in its order, with their units; behind the empty line those that it lacks.
_FIGURES = {
    "E2EL": ("e2el", "ms"),
    "TTFT": ("ttft", "ms"),
    "TPOT": ("tpot", "ms"),
    "ITL": ("itl", "ms"),
    "InputTokens": ("input_tokens", ""),
    "OutputTokens": ("output_tokens", ""),
    "OutputTokenThroughput": ("output_token_throughput", "token/s"),
    "PrefillTokenThroughput": ("prefill_token_throughput", "token/s"),
    #
    "FirstChunkTTFT": ("first_chunk", "ms"),  # AISBench's own TTFT
    "ScheduledTTFT": ("ttft_scheduled", "ms"),
    "ScheduledE2EL": ("e2el_scheduled", "ms"),
    "SendLag": ("send_lag", "ms"),
}


def write_aisbench(directory: Path, run: Run) -> None:
    """Write the three files, below ``directory``/performances."""
    folder = directory / "performances" / file_name(run.settings.model)
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(run.workload_name)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(performance_rows(run))
    (folder / f"{name}.json").write_text(
        json.dumps(common_metrics(run), indent=4, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    lines = [json.dumps(_detail(record), ensure_ascii=False) + "\n" for record in run.records]
    (folder / f"{name}_details.jsonl").write_text("".join(lines), encoding="utf-8")


def performance_rows(run: Run) -> list[list[str]]:
    """Return the table of figures, its header first."""
    rows = [list(_HEADER)]
    for name, (figure, unit) in _FIGURES.items():
        scale = MS if unit == "ms" else 1.0
        for stage, totals in _stages(run).items():
            if (of := totals.figures.get(figure)) is not None:
                cells = [f"{_number(scale * getattr(of, one))} {unit}".rstrip() for one in _STATISTICS]
                rows.append([name, stage, *cells, str(of.n)])
    return rows


def common_metrics(run: Run) -> dict[str, dict[str, str | int]]:
    """Return the totals by name and stage; AISBench lacks those of SLO and devices."""
    found: dict[str, dict[str, str | int]] = {}
    for stage, totals in _stages(run).items():
        for name, value in _totals(run, totals).items():
            found.setdefault(name, {})[stage] = value
    return found


def _stages(run: Run) -> Mapping[str, Totals]:
    """Return the figures by AISBench's stage name; those of each modality too, where there are several."""
    by_modality = {f"total/{modality}": totals for modality, totals in run.summary.by_modality.items()}
    return {"total": run.total, **by_modality}


def _totals(run: Run, totals: Totals) -> dict[str, str | int]:
    return {
        "Benchmark Duration": f"{_number(MS * totals.duration_s)} ms",
        "Total Requests": totals.num_requests,
        "Failed Requests": totals.num_failed,
        "Success Requests": totals.num_succeeded,
        "Concurrency": _number(totals.mean_concurrency),
        "Max Concurrency": run.settings.max_concurrency or totals.max_concurrency,
        "Request Throughput": f"{_number(totals.request_throughput)} req/s",
        "Total Input Tokens": totals.total_input_tokens,
        "Prefill Token Throughput": f"{_number(totals.prefill_token_throughput)} token/s",
        "Total Generated Tokens": totals.total_output_tokens,
        "Input Token Throughput": f"{_number(totals.input_token_throughput)} token/s",
        "Output Token Throughput": f"{_number(totals.output_token_throughput)} token/s",
        "Total Token Throughput": f"{_number(totals.total_token_throughput)} token/s",
        "SLO Attainment": _share(totals.attainment),
        "TTFT Attainment": _share(totals.ttft_attainment),
        "TPOT Attainment": _share(totals.tpot_attainment),
        "Goodput": f"{_number(totals.goodput)} req/s",
        "Goodput Per Device": f"{_number(totals.goodput_per_device)} req/s",
        "Effective Throughput": f"{_number(totals.effective_throughput)} token/s",
        "Effective Throughput Per Device": f"{_number(totals.effective_throughput_per_device)} token/s",
        "Achieved Rate": f"{_number(totals.achieved_rate)} req/s",
    }


def _detail(record: Record) -> dict[str, Any]:
    """One request; times in seconds of the plan's axis. ``time_points``: sent, then each chunk with a token."""
    return {
        "data_abbr": record.workload,
        "id": record.index,
        "uuid": record.request_id,
        "turn_id": record.turn,
        "success": record.succeeded,
        "error_info": record.detail,
        "input_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "start_time": record.sent_s,
        "end_time": record.finish_s,
        "latency": record.e2el_s,
        "ttft": record.ttft_s,
        "tpot": record.tpot_s,
        "itl": record.itl_s,
        "time_points": [] if record.sent_s is None else [record.sent_s, *record.token_times_s],
        "first_chunk_ttft": record.first_chunk_latency_s,
        "scheduled_time": record.scheduled_s,
        "modality": record.modality,
        "failure": record.failure,
        "finish_reason": record.finish_reason,
    }


def _share(share: Share) -> str:
    low, high = 100 * share.low, 100 * share.high
    return f"{_number(100 * share.value)} % ({low:.1f} to {high:.1f})"


def _number(value: float) -> str:
    return str(round(value, 4))
