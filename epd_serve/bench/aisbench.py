"""Results as AISBench lays them out, for scripts that read its files.

::

    performances/<model>/<dataset>.csv            one row for each figure and stage
    performances/<model>/<dataset>.json           totals, with units in the texts
    performances/<model>/<dataset>_details.jsonl  one line for each request

Rows and keys of AISBench 3.1 come first and under its names; what it does not have follows. Times are rounded to
0.1 microseconds.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epd_serve.bench.results import MS, Measured, file_name
from epd_serve.bench.statistics import distribution
from epd_serve.bench.types import Distribution, Record, Share, WindowSummary

STATISTICS = {
    "Average": "mean",
    "Min": "min",
    "Max": "max",
    "Median": "median",
    "P75": "p75",
    "P90": "p90",
    "P99": "p99",
}
#: AISBench's names of our figures, in its order.
_FIGURES = {
    "E2EL": "e2el",
    "TTFT": "ttft",
    "TPOT": "tpot",
    "ITL": "itl",
    "InputTokens": "input_tokens",
    "OutputTokens": "output_tokens",
    "OutputTokenThroughput": "output_token_throughput",
    "PrefillTokenThroughput": "prefill_token_throughput",
}
#: What it does not have. Its own TTFT is FirstChunkTTFT.
_MORE_FIGURES = {
    "FirstChunkTTFT": "first_chunk",
    "ScheduledTTFT": "ttft_scheduled",
    "ScheduledE2EL": "e2el_scheduled",
    "SendLag": "send_lag",
}
_COUNTS = ("InputTokens", "OutputTokens")
_THROUGHPUTS = ("OutputTokenThroughput", "PrefillTokenThroughput")


def write_aisbench(directory: Path, measured: Measured) -> None:
    """The three files, below ``directory``/performances."""
    folder = directory / "performances" / file_name(measured.settings.model)
    folder.mkdir(parents=True, exist_ok=True)
    name = file_name(measured.workload_name)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(performance_rows(measured))
    (folder / f"{name}.json").write_text(
        json.dumps(common_metrics(measured), indent=4, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    lines = [json.dumps(_detail(record), ensure_ascii=False) + "\n" for record in measured.records]
    (folder / f"{name}_details.jsonl").write_text("".join(lines), encoding="utf-8")


def performance_rows(measured: Measured) -> list[list[str]]:
    """The table of figures, its header first."""
    rows = [["Performance Parameters", "Stage", *STATISTICS, "N"]]
    for name, figure in {**_FIGURES, **_MORE_FIGURES}.items():
        for stage, window in _stages(measured).items():
            of = _prefill(measured, window) if figure == "prefill_token_throughput" else window.figures.get(figure)
            if of is not None:
                rows.append([name, stage, *_row(name, of)])
    return rows


def common_metrics(measured: Measured) -> dict[str, dict[str, str | int]]:
    """Totals by stage. Those of SLO and devices, and latencies since the plan's time, are ours."""
    found: dict[str, dict[str, str | int]] = {}
    for stage, window in _stages(measured).items():
        for name, value in _totals(measured, window).items():
            found.setdefault(name, {})[stage] = value
    return found


def _stages(measured: Measured) -> Mapping[str, WindowSummary]:
    """The summaries by AISBench's stage names; those of each modality too, where there are several."""
    summary = measured.summary
    stages = {"total": summary.total}
    if summary.stable is not None:
        stages["stable"] = summary.stable
    stages |= {f"total/{modality}": window for modality, window in summary.by_modality.items()}
    return stages | {f"stable/{modality}": window for modality, window in summary.stable_by_modality.items()}


def _row(name: str, of: Distribution) -> list[str]:
    values = [getattr(of, attribute) for attribute in STATISTICS.values()]
    if name in _COUNTS:
        texts = [_number(value) for value in values]
    elif name in _THROUGHPUTS:
        texts = [f"{_number(value)} token/s" for value in values]
    else:
        texts = [f"{_number(MS * value)} ms" for value in values]
    return [*texts, str(of.n)]


def _totals(measured: Measured, window: WindowSummary) -> dict[str, str | int]:
    max_concurrency = measured.settings.max_concurrency or window.max_concurrency
    return {
        "Benchmark Duration": f"{_number(MS * window.duration_s)} ms",
        "Total Requests": window.num_requests,
        "Failed Requests": window.num_failed,
        "Success Requests": window.num_succeeded,
        "Concurrency": _number(window.mean_concurrency),
        "Max Concurrency": max_concurrency,
        "Request Throughput": f"{_number(window.request_throughput)} req/s",
        "Total Input Tokens": window.total_input_tokens,
        "Prefill Token Throughput": f"{_number(window.prefill_token_throughput)} token/s",
        "Total Generated Tokens": window.total_output_tokens,
        "Input Token Throughput": f"{_number(window.input_token_throughput)} token/s",
        "Output Token Throughput": f"{_number(window.output_token_throughput)} token/s",
        "Total Token Throughput": f"{_number(window.total_token_throughput)} token/s",
        "SLO Attainment": _share(window.attainment),
        "TTFT Attainment": _share(window.ttft_attainment),
        "TPOT Attainment": _share(window.tpot_attainment),
        "Goodput": f"{_number(window.goodput)} req/s",
        "Goodput Per Device": f"{_number(window.goodput_per_device)} req/s",
        "Effective Throughput": f"{_number(window.effective_throughput)} token/s",
        "Effective Throughput Per Device": f"{_number(window.effective_throughput_per_device)} token/s",
        "Achieved Rate": f"{_number(window.achieved_rate)} req/s",
    }


def _detail(record: Record) -> dict[str, Any]:
    """One request; times in seconds of the plan's axis. ``time_points``: sent, then each chunk with a token."""
    itl = record.itl_s
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
        "itl": itl,
        "time_points": [] if record.sent_s is None else [record.sent_s, *record.token_times_s],
        "first_chunk_ttft": record.first_chunk_latency_s,
        "scheduled_time": record.scheduled_s,
        "modality": record.modality,
        "failure": record.failure,
        "finish_reason": record.finish_reason,
    }


def _prefill(measured: Measured, window: WindowSummary) -> Distribution | None:
    """Input tokens over TTFT, of each request that was sent within the window."""
    return distribution(
        record.num_prompt_tokens / record.ttft_s
        for record in measured.records
        if record.succeeded
        and record.sent_s is not None
        and window.begin_s <= record.sent_s < window.end_s
        and window.modality in ("all", record.modality)
        and record.num_prompt_tokens is not None
        and record.ttft_s
    )


def _share(share: Share) -> str:
    low, high = 100 * share.low, 100 * share.high
    return f"{_number(100 * share.value)} % ({low:.1f} to {high:.1f})"


def _number(value: float) -> str:
    return str(round(value, 4))
