"""The tables of the transfer experiments, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

Data = dict[str, Any]
METHODS = ("neither", "prefetch", "grouped", "both")


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


def _key(paper: Data, tokens: int) -> Any:
    """JSON has made the keys text; fresh data have numbers."""
    return tokens if tokens in paper else str(tokens)


TABLES: dict[str, Callable[[Data], Table]] = {"table2": table2, "table3": table3, "table4": table4}
