"""The papers' tables with the real gateway, schedulers and transfers over emulated devices that compute nothing.

    python -m benchmarks.papers table5        # EPD-Serve (003): deployments under load
    python -m benchmarks.papers figures       # EPD-Serve: figures 8 to 17
    python -m benchmarks.papers goodput       # TriInfer, HydraInfer (000, 002): figure 9
    python -m benchmarks.papers encoders      # EPD (001): tables 1 and 4
    python -m benchmarks.papers tiers         # HeteroServe (004): tables 4 and 5
    python -m benchmarks.papers all --minutes 10

Nothing is tuned: devices take the times of their data sheets (:mod:`device.datasheets`) unless a row says that
they have the paper's. All but the chips is real and runs on this machine's cores; how these are kept out of the
figures, :mod:`benchmarks.papers.measure` says, and the idle part of their time stands beside them.

Each run is in the output when it is done, and is not made again: called again, the command goes on. With
``--minutes`` no run begins after them. ``--report`` makes no run: it prints results and the paper's figures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import RESULTS, argument_parser
from benchmarks.papers import epd, epdserve, heteroserve, triinfer
from benchmarks.papers.measure import Deployment, Rows, go_on, read


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    deployments: Callable[[], list[Deployment]]
    report: Callable[[Rows], str]


EXPERIMENTS = {
    "table5": Experiment(deployments=epdserve.table5, report=epdserve.table5_report),
    "figures": Experiment(deployments=epdserve.figures, report=epdserve.figures_report),
    "goodput": Experiment(deployments=triinfer.deployments, report=triinfer.report),
    "encoders": Experiment(deployments=epd.deployments, report=epd.report),
    "tiers": Experiment(deployments=heteroserve.deployments, report=heteroserve.report),
}


def section(name: str, output: Path) -> str:
    """Return the tables of an experiment as markdown, with the file that they are from."""
    rows = read(output)
    link = f"[{output.name}](../../benchmarks/results/{output.name})"
    return f"{EXPERIMENTS[name].report(rows)}\n{len(rows)} runs: {link}.\n"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("what", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="deployments whose names have one of these in them"
    )
    parser.add_argument("--report", action="store_true", help="make no runs")
    wanted: argparse.Namespace = parser.parse_args()
    until_s = time.monotonic() + 60 * wanted.minutes
    for name in EXPERIMENTS if wanted.what == "all" else [wanted.what]:
        output = RESULTS / f"papers-{name}.json"
        if not wanted.report:
            deployments = [
                one
                for one in EXPERIMENTS[name].deployments()
                if wanted.only is None or any(part in one.name for part in wanted.only)
            ]
            num_left = go_on(deployments, output, f"python -m benchmarks.papers {name}", until_s)
            print(f"{name}: {num_left} runs are left")
        if output.exists():
            print(section(name, output))


if __name__ == "__main__":
    main()
