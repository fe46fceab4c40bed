"""A run, or several, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from epd_serve.bench.sampled import Sampled
from epd_serve.bench.types import Distribution, RunSettings, Share, Summary, WindowSummary

_ROWS = (
    ("TTFT", "ttft", 1e3, "ms"),
    ("TTFT scheduled", "ttft_scheduled", 1e3, "ms"),
    ("first chunk", "first_chunk", 1e3, "ms"),
    ("TPOT", "tpot", 1e3, "ms"),
    ("ITL", "itl", 1e3, "ms"),
    ("E2EL", "e2el", 1e3, "ms"),
    ("send lag", "send_lag", 1e3, "ms"),
    ("input tokens", "input_tokens", 1.0, ""),
    ("output tokens", "output_tokens", 1.0, ""),
)


def show_summary(console: Console, settings: RunSettings, summary: Summary, sampled: Sampled) -> None:
    """Print latencies, rates, the server's own figures, and the warnings of one run."""
    for name, window in (("all requests", summary.total), ("stable window", summary.stable)):
        if window is not None:
            console.print(_latencies(f"{settings.label or settings.workload}: {name}", window.figures))
    console.print(_rates(settings, summary))
    for name, distribution in summary.total.stages.items():
        console.print(
            f"  stage {name}: median {distribution.median * 1e3:.1f} ms, p90 {distribution.p90 * 1e3:.1f} ms "
            f"({distribution.n} requests)",
            highlight=False,
        )
    _show_sampled(console, sampled)
    for warning in summary.warnings:
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)


def show_sweep(console: Console, runs: Sequence[tuple[RunSettings, Summary]]) -> None:
    """One line for each rate."""
    table = Table(title="by rate", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for column in ("req/s", "sent", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "attained", "95 %", "tok/s"):
        table.add_column(column.replace("T p", "T\np"), justify="right")  # ten columns fit a terminal of 80
    table.add_column("effective\ntok/s per\ndevice", justify="right")
    for settings, summary in runs:
        total = summary.total
        table.add_row(
            "-" if settings.rate is None else f"{settings.rate:g}",
            f"{total.achieved_rate:.2f}",
            *(_quantiles(total.figures.get("ttft"))),
            *(_quantiles(total.figures.get("tpot"))),
            f"{total.attainment.value:.1%}",
            _interval(total.attainment).removesuffix(" %"),
            f"{total.output_token_throughput:.1f}",
            f"{total.effective_throughput_per_device:.1f}",
        )
    console.print(table)


def _show_sampled(console: Console, sampled: Sampled) -> None:
    for name, share in sampled.cache_hits.items():
        console.print(f"  {name} cache: {share.part} hits of {share.whole} ({share.value:.1%})", highlight=False)
    for name, value in sampled.utilisation.items():
        console.print(f"  {name}: {value:.1%} busy on average", highlight=False)


def _latencies(title: str, figures: dict[str, Distribution]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("", no_wrap=True)
    for column in ("mean", "min", "max", "median", "p75", "p90", "p99", "N"):
        table.add_column(column, justify="right")
    for label, name, scale, unit in _ROWS:
        one = figures.get(name)
        if one is not None:
            values = (one.mean, one.min, one.max, one.median, one.p75, one.p90, one.p99)
            table.add_row(f"{label} {unit}".strip(), *(_number(value * scale) for value in values), str(one.n))
    return table


def _rates(settings: RunSettings, summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("", no_wrap=True)
    windows = [("total", summary.total), *([("stable", summary.stable)] if summary.stable else [])]
    windows += list(summary.by_modality.items())
    for name, _ in windows:
        table.add_column(name, justify="right")

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    each = [window for _, window in windows]
    slo = settings.slo
    row("requests (failed)", *(f"{one.num_requests} ({one.num_failed})" for one in each))
    row("duration s", *(f"{one.duration_s:.2f}" for one in each))
    row("planned → sent req/s", *(_planned(one) for one in each))
    row("finished req/s", *(f"{one.request_throughput:.3f}" for one in each))
    row("input tok/s", *(f"{one.input_token_throughput:.1f}" for one in each))
    row("output tok/s", *(f"{one.output_token_throughput:.1f}" for one in each))
    row("concurrency mean (max)", *(f"{one.mean_concurrency:.1f} ({one.max_concurrency})" for one in each))
    attained = (f"{one.attainment.value:.1%} ({_interval(one.attainment)})" for one in each)
    row(f"TTFT ≤ {slo.ttft_ms:g}, TPOT ≤ {slo.tpot_ms:g} ms", *attained)
    row("goodput req/s per device", *(f"{one.goodput_per_device:.3f}" for one in each))
    row("effective tok/s per device", *(f"{one.effective_throughput_per_device:.1f}" for one in each))
    return table


def _planned(window: WindowSummary) -> str:
    planned = "-" if window.planned_rate is None else f"{window.planned_rate:.2f}"
    return f"{planned} → {window.achieved_rate:.2f}"


def _interval(share: Share) -> str:
    return f"{100 * share.low:.1f}–{100 * share.high:.1f} %"


def _quantiles(one: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if one is None else (_number(one.median * 1e3), _number(one.p99 * 1e3))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
