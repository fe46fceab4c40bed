"""Write a run in the formats of other tools: vLLM's result.json and AISBench's tables.

``result.json`` has the names and conventions of ``vllm bench serve --save-result --save-detailed``: latencies
start at sending, TPOT omits requests with one token, a failed request has 0 in every list. ``request_goodput``
counts both limits of the SLO, with TTFT from the *scheduled* time. Figures that vLLM lacks are under
``epd_serve``. AISBench 3.1's rows and keys come first in its files, ours follow::

    performances/<model>/<dataset>.csv            one row per figure and stage
    performances/<model>/<dataset>.json           totals, with units in the texts
    performances/<model>/<dataset>_details.jsonl  one line per request
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections import Counter
from typing import Any

import msgspec

from epd_serve.bench.plan import parse_arrivals
from epd_serve.bench.run import Run
from epd_serve.bench.summary import MS
from epd_serve.bench.types import Record, Share, Totals


def write_result_files(run: Run) -> None:
    """Write AISBench's files and vLLM's result.json into the run's directory."""
    write_aisbench(run)
    (run.path / "result.json").write_bytes(msgspec.json.encode(vllm_result(run)) + b"\n")


def file_name(text: str) -> str:
    """Return ``text`` with hyphens for characters that do not belong in a file name."""
    return re.sub(r"[^A-Za-z0-9._()-]+", "-", text).strip("-.") or "unnamed"


def vllm_result(run: Run) -> dict[str, Any]:
    """Return a run's figures under the names of vLLM's benchmark."""
    settings, total, records = run.settings, run.total, run.records
    begin_s = min((record.sent_s for record in records if record.sent_s is not None), default=0.0)
    succeeded = [record for record in records if record.succeeded]
    tokens_by_second = Counter(int(at_s - begin_s) for record in succeeded for at_s in record.token_times_s)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(settings.created_unix_s)),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": settings.label or None,
        "model_id": settings.model,
        "tokenizer_id": settings.model,
        "num_prompts": settings.num_requests,
        "request_rate": "inf" if settings.rate is None else settings.rate,
        "burstiness": parse_arrivals(settings).shape,
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
        "ttfts": [(record.ttft_s or 0.0) if record.succeeded else 0.0 for record in records],
        "itls": [record.itl_s if record.succeeded else [] for record in records],
        "latencies": [(record.e2el_s or 0.0) if record.succeeded else 0.0 for record in records],
        "start_times": [record.sent_s or 0.0 for record in records],
        "queue_times": [record.slot_wait_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [f"{record.failure}: {record.detail}" if record.failure else "" for record in records],
        "max_output_tokens_per_s": float(max(tokens_by_second.values(), default=0)),
        "max_concurrent_requests": total.max_concurrency,
        "rtfx": 0.0,
        "epd_serve": {"settings": msgspec.to_builtins(settings), "summary": msgspec.to_builtins(run.summary)},
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p75", "p90", "p95", "p99"):
            result[f"{statistic}_{name}_ms"] = total.ms(name, statistic) or 0.0
    return result


_STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p99")
_HEADER = ("Performance Parameters", "Stage", "Average", "Min", "Max", "Median", "P75", "P90", "P99", "N")
#: AISBench's names of our figures, in its order, with units; ours follow after the empty line.
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


def write_aisbench(run: Run) -> None:
    """Write the three files below ``performances`` in the run's directory."""
    folder = run.path / "performances" / file_name(run.settings.model)
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(run.workload_name)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(performance_rows(run))
    text = json.dumps(common_metrics(run), indent=4, ensure_ascii=False) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    lines = [json.dumps(_request_details(record), ensure_ascii=False) + "\n" for record in run.records]
    (folder / f"{name}_details.jsonl").write_text("".join(lines), encoding="utf-8")


def performance_rows(run: Run) -> list[list[str]]:
    """Return the table of figures, its header first."""
    rows = [list(_HEADER)]
    for name, (figure, unit) in _FIGURES.items():
        scale = MS if unit == "ms" else 1.0
        for stage, totals in _totals_by_stage(run).items():
            if (found := totals.figures.get(figure)) is not None:
                cells = [f"{_number(scale * getattr(found, one))} {unit}".rstrip() for one in _STATISTICS]
                rows.append([name, stage, *cells, str(found.n)])
    return rows


def _totals_by_stage(run: Run) -> dict[str, Totals]:
    """Return the totals under AISBench's stage names, also of each modality if there are several."""
    by_modality = {f"total/{modality}": totals for modality, totals in run.summary.by_modality.items()}
    return {"total": run.total, **by_modality}


def common_metrics(run: Run) -> dict[str, dict[str, str | int]]:
    """Return the totals by name and stage; those of SLO and devices are not AISBench's."""
    found: dict[str, dict[str, str | int]] = {}
    for stage, one in _totals_by_stage(run).items():
        figures: dict[str, str | int] = {
            "Benchmark Duration": f"{_number(MS * one.duration_s)} ms",
            "Total Requests": one.num_requests,
            "Failed Requests": one.num_failed,
            "Success Requests": one.num_succeeded,
            "Concurrency": _number(one.mean_concurrency),
            "Max Concurrency": run.settings.max_concurrency or one.max_concurrency,
            "Request Throughput": f"{_number(one.request_throughput)} req/s",
            "Total Input Tokens": one.total_input_tokens,
            "Prefill Token Throughput": f"{_number(one.prefill_token_throughput)} token/s",
            "Total Generated Tokens": one.total_output_tokens,
            "Input Token Throughput": f"{_number(one.input_token_throughput)} token/s",
            "Output Token Throughput": f"{_number(one.output_token_throughput)} token/s",
            "Total Token Throughput": f"{_number(one.total_token_throughput)} token/s",
            "SLO Attainment": _percent(one.attainment),
            "TTFT Attainment": _percent(one.ttft_attainment),
            "TPOT Attainment": _percent(one.tpot_attainment),
            "Goodput": f"{_number(one.goodput)} req/s",
            "Goodput Per Device": f"{_number(one.goodput_per_device)} req/s",
            "Effective Throughput": f"{_number(one.effective_throughput)} token/s",
            "Effective Throughput Per Device": f"{_number(one.effective_throughput_per_device)} token/s",
            "Achieved Rate": f"{_number(one.achieved_rate)} req/s",
        }
        for name, value in figures.items():
            found.setdefault(name, {})[stage] = value
    return found


def _request_details(record: Record) -> dict[str, Any]:
    """Return one request in seconds since the schedule began; ``time_points``: sent, then each token's chunk."""
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


def _percent(share: Share) -> str:
    return f"{_number(100 * share.value)} % ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _number(value: float) -> str:
    return str(round(value, 4))
