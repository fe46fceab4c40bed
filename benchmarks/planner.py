"""The planner against the papers and against the clock.

    python -m benchmarks.planner speed                      # 100,000 requests on 64 instances
    python -m benchmarks.planner papers                     # EPD-Serve's table 5 and figure 17
    python -m benchmarks.planner search [--cells N]         # TriInfer's section 5.4, 15 cells

Against own runs: ``benchmarks.planner_runs`` measures them, ``benchmarks.planner_measured`` simulates them again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.planner_papers import TABLE_5, kendall_tau, section_5_4, table_5, winners
from epd_serve.cost.roofline import analytic_profile, spec_of
from epd_serve.cost.shape import shape_of
from epd_serve.sim.simulator import build, check_books, simulate
from epd_serve.sim.spec import Batching
from epd_serve.sim.workloads import SHAREGPT_4O
from epd_serve.topology import parse_topology

RESULTS = Path(__file__).parent / "results"
_FACTORS = (1.0, 1.5, 2.0, 2.5)


def speed(num_requests: int, line: str = "8E-16P-40D", rate: float = 400) -> dict[str, Any]:
    """CPU seconds of one thread; 64 instances by itself."""
    profile = analytic_profile(shape_of("qwen2.5-vl-7b"), spec_of("ascend-910b3"))
    topology = parse_topology(line)
    names = [f"npu:{i}" for i in range(topology.num_devices)]
    deployment = build(topology, names, lambda *_: profile, batching=Batching(ttft_s=2, tpot_s=0.05))
    requests = SHAREGPT_4O.requests(num_requests, rate, seed=0)
    began = time.process_time()
    outcome = simulate(deployment, requests)
    cpu_s = time.process_time() - began
    check_books(outcome)
    return {
        "topology": line,
        "requests": num_requests,
        "cpu_s": cpu_s,
        "virtual_s": outcome.seconds,
        "steps": outcome.num_steps,
        "events": outcome.num_events,
    }


def papers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    printed = list(TABLE_5.values())
    for factor in _FACTORS:
        measured = table_5(factor)
        found[f"{factor:g} times the paper's rates"] = {
            "figures": measured,
            "winners": winners(measured),
            "tau": {
                name: kendall_tau([one[name] for one in measured.values()], [row[column] for row in printed])
                for column, name in enumerate(("ttft_ms", "tpot_ms", "attainment", "effective_per_npu"))
            },
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "papers", "search"])
    parser.add_argument("--requests", type=int, default=100_000, help="of speed")
    parser.add_argument("--cells", type=int, default=15, help="of search: models x data sets")
    parser.add_argument("--most", type=int, default=250, help="of search: requests in a simulation at most")
    wanted = parser.parse_args()
    if wanted.what == "speed":
        found: Any = speed(wanted.requests)
    elif wanted.what == "papers":
        found = papers()
    else:
        found = section_5_4(wanted.cells, most=wanted.most)
    text = json.dumps(found, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"planner-{wanted.what}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
