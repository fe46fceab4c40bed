"""The figures of a run as Markdown, beside what they ought to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gateway.cells import CELLS, Cell

OURS, REFERENCE, DIRECT = "epd-serve", "vllm-epd", "direct"
_MAX_RSS_MIB = 150


def table(report: dict[str, Any]) -> str:
    """Tables of CPU, time to first token, token delay and memory."""
    names = list(report["gateways"])
    cells = [cell for cell in CELLS if cell.name in report["cells"]]

    def figure(cell: Cell, name: str, what: str) -> float | None:
        value = report["cells"][cell.name].get(name, {}).get(what)
        return None if value is None else float(value)

    def added(cell: Cell, name: str) -> float | None:
        own, direct = figure(cell, name, "ttft_p50_ms"), figure(cell, DIRECT, "ttft_p50_ms")
        return None if own is None or direct is None else own - direct

    lines = [
        f"{report['machine']}; {report['tokens']} tokens a stream, median of {report['rounds']} interleaved rounds"
    ]
    lines += ["", *(f"* `{name}`: {what}" for name, what in report["gateways"].items())]

    def section(
        title: str, chosen: list[Cell], value: Callable[[Cell, str], float | None], goal: Callable[[Cell], str]
    ) -> None:
        if not chosen:
            return
        lines.extend(
            ["", f"**{title}**", "", f"| load | {' | '.join(names)} | goal |", "|---" * (len(names) + 2) + "|"]
        )
        for cell in chosen:
            row = [_number(value(cell, name)) for name in names]
            lines.append(f"| {cell.name} | {' | '.join(row)} | {goal(cell)} |")

    def cpu_goal(cell: Cell) -> str:
        own, other = figure(cell, OURS, "cpu_ms"), figure(cell, REFERENCE, "cpu_ms")
        if not own or other is None:
            return "" if cell.target is None else f"{cell.target:g} × less than {REFERENCE}"
        return f"{other / own:.1f} × less than {REFERENCE}" + (
            "" if cell.target is None else f" (≥ {cell.target:g})"
        )

    section(
        "CPU per request of the gateway's processes, ms",
        [cell for cell in cells if cell.connections > 1],
        lambda cell, name: figure(cell, name, "cpu_ms"),
        cpu_goal,
    )
    section(
        "Added time to first token, p50, one request at a time, ms",
        [cell for cell in cells if cell.target_ttft_ms is not None],
        added,
        lambda cell: f"≤ {cell.target_ttft_ms:g}",
    )
    section(
        "Token delay p99 (from the instance's send to the client's receipt), ms",
        [cell for cell in cells if cell.gap_ms],
        lambda cell, name: figure(cell, name, "delay_p99_ms"),
        lambda cell: "" if cell.target_delay_ms is None else f"≤ {cell.target_delay_ms:g}",
    )
    section(
        "Requests that failed",
        [cell for cell in cells if any(figure(cell, name, "failed") for name in names)],
        lambda cell, name: figure(cell, name, "failed"),
        lambda _: "0",
    )
    section(
        "Requests that the load generator could not send, for all its connections waited for answers",
        [cell for cell in cells if any(figure(cell, name, "unsent") for name in names)],
        lambda cell, name: figure(cell, name, "unsent"),
        lambda _: "0",
    )
    peak = {name: max((figure(cell, name, "rss_mib") or 0) for cell in cells) for name in names}
    lines += ["", f"**Resident memory, MiB** (goal of `{OURS}`: ≤ {_MAX_RSS_MIB})", ""]
    lines += [", ".join(f"{name} {value:.0f}" for name, value in peak.items())]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
