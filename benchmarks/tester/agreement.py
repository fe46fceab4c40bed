"""One server measured by ``vllm bench serve`` and by ours, in turn.

``python -m benchmarks.tester.agreement --vllm PROGRAM [--out FILE]``

On a machine that others use the server itself is not the same twice, and a tester that is held up adds to every
latency. So the figures compared are those of the least disturbed round of each tester (the lowest latency, the
highest throughput); medians over the rounds stand beside them, and what the server wrote down itself.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.common import argument_parser, machine, write
from benchmarks.tester.paced import NUM_PROMPT_TOKENS, NUM_TOKENS
from benchmarks.tester.requests import Plain
from epd_serve.bench.session import Session
from epd_serve.bench.types import RunSettings

#: Where the tokenizer is that vLLM's tester makes its prompts with: the built-in model's.
TOKENIZER = Path(__file__).parents[2] / "epd_serve" / "demo" / "weights"
#: vLLM's name to ours.
FIGURES = (
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "request_throughput",
    "output_throughput",
)
#: What the server tells of itself.
TRUTH = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms")
#: The three of the promise.
PROMISED = (
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "request_throughput",
    "output_throughput",
)
LIMIT = 0.03
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Cell:
    name: str
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None


CELLS = (
    Cell(name="closed loop, 8 at once", num_requests=64, concurrency=8),
    Cell(name="6 requests/s at equal gaps", num_requests=72, rate=6.0),
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vllm", required=True, help="the program vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epd-serve-agreement-") as name, _server() as url:
        report = _measure(url, options.vllm, Path(name), options.rounds)
    text = _table(report)
    print(text)
    if options.out is not None:
        write(options.out.with_suffix(".json"), report)
        options.out.with_suffix(".md").write_text(text)
    sys.exit(0 if report["agrees"] else 1)


def _measure(url: str, vllm: str, directory: Path, rounds: int) -> dict[str, Any]:
    found: dict[str, dict[str, list[Figures]]] = {cell.name: {"vllm": [], "ours": []} for cell in CELLS}
    for number in range(rounds):
        for cell in CELLS:
            for tester in ("vllm", "ours") if number % 2 else ("ours", "vllm"):
                urllib.request.urlopen(f"{url}/reset").close()
                path = directory / f"{tester}-{number}-{CELLS.index(cell)}"
                figures = _vllm(vllm, url, cell, path) if tester == "vllm" else _ours(url, cell, path)
                with urllib.request.urlopen(f"{url}/truth") as answer:
                    truth = json.load(answer)
                figures |= {f"{name}, as served": truth[name] for name in TRUTH}
                found[cell.name][tester].append(figures)
                print(f"round {number + 1}, {cell.name}, {tester}: {figures}", file=sys.stderr, flush=True)
    version = subprocess.run([vllm, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    cells = {name: _compare(both["vllm"], both["ours"]) for name, both in found.items()}
    return {
        "command": f"python -m benchmarks.tester.agreement --vllm vllm --rounds {rounds}",
        "machine": machine(),
        "vllm": version,
        "load_average": os.getloadavg()[0],
        "cells": cells,
        "agrees": all(abs(cell[name]["ratio"] - 1) <= LIMIT for cell in cells.values() for name in PROMISED),
        "rounds": found,
    }


def _compare(theirs: list[Figures], ours: list[Figures]) -> dict[str, Figures]:
    """Per figure: the least disturbed round of each, their ratio, and the medians."""
    found = {}
    for name in (*FIGURES, *(f"{name}, as served" for name in TRUTH)):
        best = max if name.endswith("throughput") else min
        vllm, our = (best(one[name] for one in some) for some in (theirs, ours))
        medians = {
            f"{tester}_median": median(one[name] for one in some)
            for tester, some in (("vllm", theirs), ("ours", ours))
        }
        found[name] = {"vllm": vllm, "ours": our, "ratio": our / vllm, **medians}
    return found


def _vllm(vllm: str, url: str, cell: Cell, path: Path) -> Figures:
    load = ["--max-concurrency", str(cell.concurrency)] if cell.concurrency else []
    # A gamma distribution with this shape has gaps that differ by a thousandth.
    load += ["--request-rate", str(cell.rate), "--burstiness", "1000000"] if cell.rate else []
    command = [vllm, "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    command += ["--base-url", url, "--model", "paced", "--tokenizer", str(TOKENIZER), "--dataset-name", "random"]
    command += ["--random-input-len", str(NUM_PROMPT_TOKENS), "--random-output-len", str(NUM_TOKENS)]
    command += ["--num-warmups", "0"]
    command += ["--num-prompts", str(cell.num_requests), "--percentile-metrics", "ttft,tpot,itl,e2el", *load]
    command += ["--save-result", "--result-dir", str(path.parent), "--result-filename", path.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    result = json.loads(path.read_text())
    assert result["completed"] == cell.num_requests, f"{result['failed']} failed"
    return {name: float(result[name]) for name in FIGURES}


def _ours(url: str, cell: Cell, path: Path) -> Figures:
    settings = RunSettings(
        base_url=url,
        model="",
        workload="plain",
        num_requests=0,
        seed=0,
        arrivals=f"closed:{cell.concurrency}" if cell.concurrency else "constant",
        rate=cell.rate,
    )
    workload = Plain(num_items=cell.num_requests, num_words=NUM_PROMPT_TOKENS, max_tokens=NUM_TOKENS)
    session = Session(console=Console(file=io.StringIO()))
    _, summary = session.begin(path, settings, workload)
    assert summary is not None
    total = summary.total
    assert not total.num_failed
    found: Figures = {
        "request_throughput": total.request_throughput,
        "output_throughput": total.output_token_throughput,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        one = total.figures[name]
        found |= {f"mean_{name}_ms": 1e3 * one.mean, f"median_{name}_ms": 1e3 * one.median}
        found[f"p99_{name}_ms"] = 1e3 * one.p99
    return {name: found[name] for name in FIGURES}


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.tester.paced"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def _table(report: dict[str, Any]) -> str:
    where = f"{report['machine']}, load average {report['load_average']:.0f}"
    lines = [f"`{report['command']}`, vLLM {report['vllm']}, {where}.", ""]
    for name, cell in report["cells"].items():
        lines += [f"{name}; the least disturbed round, and the median:", ""]
        lines += [
            "| | vllm bench serve | epd-serve bench | ratio | medians | ratio |",
            "|---|---|---|---|---|---|",
        ]
        for figure, both in cell.items():
            vllm, ours = both["vllm_median"], both["ours_median"]
            lines.append(
                f"| {figure} | {both['vllm']:.3f} | {both['ours']:.3f} | {both['ratio']:.4f} "
                f"| {vllm:.3f}, {ours:.3f} | {ours / vllm:.4f} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
