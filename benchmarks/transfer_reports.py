"""The tables and plots of the transfer experiments, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no screen is needed

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

Data = dict[str, Any]
COLOURS = {"oneshot": "#9a9a9a", "layerwise": "#d1812f", "grouped": "#2f6fb0", "paper": "#d9d4c8"}
METHODS = ("neither", "prefetch", "grouped", "both")


def report(name: str, data: Data, directory: Path) -> None:
    """Print the table of an experiment and write its plot beside its data."""
    table, plot = REPORTS[name]
    Console(width=130).print(table(data))
    if plot is not None:
        figure = plot(data)
        figure.savefig(directory / f"transfer-{name}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def table4(data: Data) -> Table:
    table = Table(
        "tokens", "mode", "KV s", "exposed s", "wait ms", "prefill s", "MB/s", "writes", "overlap", "paper"
    )
    for row in data["rows"]:
        paper = data["paper"][_key(data["paper"], row["tokens"])]
        said = {"layerwise": paper["baseline"], "grouped": paper["optimised"]}.get(row["mode"])
        table.add_row(
            str(row["tokens"]),
            row["mode"],
            f"{row['kv_s']:.2f}",
            f"{row['exposed_s']:.3f}",
            f"{1000 * row['wait_s']:.0f}",
            f"{row['prefill_s']:.2f}",
            f"{row['bytes_per_s'] / 1e6:.0f}",
            f"{row['writes']:.0f}",
            percent(row["overlap"]),
            f"{said} %" if said is not None else "",
        )
    return table


def plot_table4(data: Data) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    modes = ("oneshot", "layerwise", "grouped")
    lengths = sorted({row["tokens"] for row in data["rows"]})
    for i, mode in enumerate(modes):
        values = [
            100 * r["overlap"] for t in lengths for r in data["rows"] if (r["tokens"], r["mode"]) == (t, mode)
        ]
        bars = axes.bar([j + 0.26 * (i - 1) for j in range(len(lengths))], values, 0.24, color=COLOURS[mode])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
        bars.set_label(mode)
    for j, tokens in enumerate(lengths):
        paper = data["paper"][_key(data["paper"], tokens)]
        for offset, key in ((0, "baseline"), (0.26, "optimised")):
            axes.hlines(paper[key], j + offset - 0.12, j + offset + 0.12, color="black", linewidth=1.5)
    axes.plot([], [], color="black", label="paper")
    axes.set_xticks(range(len(lengths)), [f"{tokens} tokens" for tokens in lengths])
    axes.set_ylabel("KV transfer hidden, %")
    axes.set_ylim(0, 112)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.14), frameon=False)
    return figure


def handshakes(data: Data) -> Table:
    table = Table("handshake", "mode", "layers a write", "overlap", "wait ms", "MB/s")
    for point in data["points"]:
        table.add_row(
            f"{point['handshake_layers']:g} layers, {point['handshake_layers'] * data['layer_ms']:.1f} ms",
            point["mode"],
            f"{point['layers_per_write']:.1f}",
            percent(point["overlap"]),
            f"{point['wait_ms']:.0f}",
            f"{point['bytes_per_s'] / 1e6:.1f}",
        )
    return table


def plot_handshakes(data: Data) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for mode in ("layerwise", "grouped"):
        points = [p for p in data["points"] if p["mode"] == mode]
        x = [p["handshake_layers"] for p in points]
        left.plot(x, [100 * p["overlap"] for p in points], "o-", color=COLOURS[mode], label=mode)
        right.plot(x, [p["wait_ms"] for p in points], "o-", color=COLOURS[mode], label=mode)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("handshake, in layers of compute")
    left.set_ylabel("KV transfer hidden, %")
    left.legend(frameon=False)
    right.set_ylabel("wait after the prompt, ms")
    right.set_yscale("log")
    figure.tight_layout()
    return figure


def table3(data: Data) -> Table:
    table = Table(
        "image",
        "MB",
        "transmission ms",
        "paper",
        "scheduling ms",
        "paper",
        "overlap",
        "paper",
        "overlap on an idle P",
    )
    for row in data["rows"]:
        paper = row["paper"]
        table.add_row(
            row["image"],
            f"{row['feature_bytes'] / 1e6:.2f}",
            f"{row['transmission_ms']:.1f}",
            f"{paper['transmission_ms']:.1f}",
            f"{row['scheduling_ms']:.1f}",
            f"{paper['scheduling_ms']:.1f}",
            percent(row["overlap"]),
            f"{paper['overlap']} %",
            percent(row["alone"]["overlap"]),
        )
    return table


def plot_table3(data: Data) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    names = [row["image"] for row in data["rows"]]
    for key, colour, label in (
        ("transmission_ms", COLOURS["layerwise"], "transmission"),
        ("scheduling_ms", COLOURS["grouped"], "scheduling"),
    ):
        axes.plot(names, [row[key] for row in data["rows"]], "o-", color=colour, label=label)
        axes.plot(names, [row["paper"][key] for row in data["rows"]], "x--", color=colour, label=f"{label}, paper")
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    return figure


def table2(data: Data) -> Table:
    table = Table(
        "rate/s", "method", "from D ms", "change", "paper", "from P ms", "change", "features hidden", "KV hidden"
    )
    for index, load in enumerate(sorted({row["load"] for row in data["rows"]})):
        rows = {row["method"]: row for row in data["rows"] if row["load"] == load}
        none, paper = rows["neither"], data["paper"]["ttft_ms"]
        for method in METHODS:
            row = rows[method]
            table.add_row(
                f"{row['rate']:.2f}",
                method,
                f"{row['decoded_ms']:.0f}",
                f"{100 * (row['decoded_ms'] / none['decoded_ms'] - 1):+.1f} %",
                f"{100 * (paper[method][index] / paper['neither'][index] - 1):+.1f} %",
                f"{row['ttft_ms']:.0f}",
                f"{100 * (row['ttft_ms'] / none['ttft_ms'] - 1):+.1f} %",
                percent(row["feature_overlap"]),
                percent(row["kv_overlap"]),
            )
    return table


def plot_table2(data: Data) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    loads = sorted({row["load"] for row in data["rows"]})
    for index, load in enumerate(loads):
        rows = {row["method"]: row for row in data["rows"] if row["load"] == load}
        paper = data["paper"]["ttft_ms"]
        ours = [100 * rows[m]["decoded_ms"] / rows["neither"]["decoded_ms"] for m in METHODS]
        theirs = [100 * paper[m][index] / paper["neither"][index] for m in METHODS]
        places = [5 * index + i for i in range(len(METHODS))]
        bars = axes.bar(places, ours, 0.8, color=COLOURS["grouped"])
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.hlines(theirs, [p - 0.4 for p in places], [p + 0.4 for p in places], color="black", linewidth=1.5)
        for place, method in zip(places, METHODS, strict=True):
            axes.text(place, 3, method, rotation=90, ha="center", va="bottom", fontsize=8, color="white")
    axes.plot([], [], color="black", label="paper")
    rates = [
        row["rate"] for load in loads for row in data["rows"] if (row["load"], row["method"]) == (load, "both")
    ]
    axes.set_xticks([1.5 + 5 * i for i in range(len(loads))], [f"{rate:.2f} requests/s" for rate in rates])
    axes.set_ylabel("time to D's first token, % of neither")
    axes.legend(frameon=False, fontsize=8)
    return figure


def handoff(data: Data) -> Table:
    table = Table("of", "transport", "bytes", "bytes that the host copies", "times")
    for row in data["rows"]:
        times = row["host_bytes"] / row["nbytes"]
        sizes = (f"{row['nbytes']:,}", f"{row['host_bytes']:,.0f}", f"{times:.4f}")
        table.add_row(row["what"], row["transport"], *sizes)
    return table


def reuse(data: Data) -> Table:
    table = Table("request", "encoded", "found", "fetched", "prefilled tokens", "prefill ms", "TTFT ms (median)")
    for row in data["rows"]:
        table.add_row(
            row["request"],
            f"{row['encoded']:.0f} of {row['requests']}",
            f"{row['found']:.0f}",
            f"{row['fetched']:.0f}",
            f"{row['prefilled_tokens']:.0f}",
            f"{row['prefill_ms']:.0f}",
            f"{row['ttft_median_ms']:.0f}",
        )
    return table


def _key(paper: Data, tokens: int) -> Any:
    """JSON has made the keys text; fresh data have numbers."""
    return tokens if tokens in paper else str(tokens)


REPORTS: dict[str, tuple[Callable[[Data], Table], Callable[[Data], Any] | None]] = {
    "table2": (table2, plot_table2),
    "table3": (table3, plot_table3),
    "table4": (table4, plot_table4),
    "handshakes": (handshakes, plot_handshakes),
    "handoff": (handoff, None),
    "reuse": (reuse, None),
}
