"""The planner against the papers and against this project's own runs.

    python -m benchmarks.planner speed                      # 100,000 requests on 64 instances
    python -m benchmarks.planner papers                     # EPD-Serve's table 5 and figure 17
    python -m benchmarks.planner search [--cells N]         # TriInfer's section 5.4, 15 cells
    python -m benchmarks.planner measured --profile P RUN... # runs of epd-serve bench, simulated again

``measured`` simulates the very requests of each run, at the times at which they were sent, on the run's topology.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.planner_papers import TABLE_5, kendall_tau, section_5_4, table_5, winners
from epd_serve.bench.run_directory import RunDirectory
from epd_serve.cost.devices import spec_of
from epd_serve.cost.interference import InterferenceMatrix
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.sim.build import build
from epd_serve.sim.request import SimRequest
from epd_serve.sim.simulator import check_books, simulate
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


def measured(runs: list[Path], profile: Profile, matrix: Path | None, pixels: int, cores: int) -> dict[str, Any]:
    """Each run beside its simulation; errors in relative terms, and the rankings by attained requests."""
    rows = [_compare(RunDirectory.open(run), profile, matrix, pixels, cores) for run in runs]
    figures = ("ttft_s", "tpot_s", "throughput")
    return {
        "runs": rows,
        "mean_error": {
            name: fmean(abs(row["simulated"][name] / row["measured"][name] - 1) for row in rows)
            for name in figures
        },
        "tau": kendall_tau(
            [row["simulated"]["goodput"] for row in rows], [row["measured"]["goodput"] for row in rows]
        )
        if len(rows) > 1
        else None,
    }


def _compare(run: RunDirectory, profile: Profile, matrix: Path | None, pixels: int, cores: int) -> dict[str, Any]:
    settings = run.settings
    records = [one for one in run.records() if one.succeeded and one.sent_s is not None and one.num_prompt_tokens]
    begin_s = min(one.sent_s for one in records if one.sent_s is not None)
    requests: list[SimRequest] = []
    for one in sorted(records, key=lambda one: one.sent_s or 0.0):
        image = "image" in one.modality
        text = (one.num_prompt_tokens or 1) - (profile.image_tokens(pixels) if image else 0)
        requests.append(
            SimRequest(
                at_s=(one.sent_s or 0.0) - begin_s,
                images=((str(one.index), pixels),) if image else (),
                num_text_tokens=max(text, 1),
                num_output_tokens=max(one.num_output_tokens, 1),
            )
        )
    topology = parse_topology(settings.topology or settings.label)
    deployment = build(
        topology,
        ["cpu"] if profile.device == "cpu" else [f"cuda:{i}" for i in range(topology.num_devices)],
        lambda *_: profile,
        matrix=InterferenceMatrix.read(matrix) if matrix else None,
        cores=cores if profile.device == "cpu" else None,
        num_blocks=4096,
    )
    outcome = simulate(deployment, requests, gaps=True)
    slo = settings.slo
    seen = [(one.ttft_s or 0.0, one.tpot_s or 0.0) for one in records]
    simulated = [
        (
            (job.first_token_s or 0.0) - job.sent_s,
            ((job.last_token_s or 0.0) - (job.first_token_s or 0.0)) / max(job.num_output - 1, 1),
        )
        for job in outcome.jobs
    ]
    duration_s = max(one.finish_s for one in records) - begin_s
    tokens = sum(one.num_output_tokens for one in records)
    return {
        "topology": str(topology),
        "rate": settings.rate,
        "workload": settings.workload,
        "measured": _figures(seen, tokens, duration_s, slo.ttft_ms, slo.tpot_ms),
        "simulated": _figures(simulated, tokens, outcome.seconds, slo.ttft_ms, slo.tpot_ms),
    }


def _figures(
    pairs: list[tuple[float, float]], tokens: int, seconds: float, ttft_ms: float, tpot_ms: float
) -> dict[str, float]:
    good = sum(1e3 * ttft <= ttft_ms and 1e3 * tpot <= tpot_ms for ttft, tpot in pairs)
    return {
        "ttft_s": fmean(ttft for ttft, _ in pairs),
        "tpot_s": fmean(tpot for _, tpot in pairs),
        "throughput": tokens / seconds,
        "goodput": good / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "papers", "search", "measured"])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--requests", type=int, default=100_000, help="of speed")
    parser.add_argument("--cells", type=int, default=15, help="of search: models x data sets")
    parser.add_argument("--most", type=int, default=250, help="of search: requests in a simulation at most")
    parser.add_argument("--profile", type=Path, help="what 'epd-serve profile' wrote")
    parser.add_argument("--interference", type=Path, help="what 'epd-serve interference --out' wrote")
    parser.add_argument("--pixels", type=int, default=448 * 448, help="of each image of a measured run")
    parser.add_argument("--cores", type=int, default=2, help="of the machine of measured runs")
    wanted = parser.parse_intermixed_args()
    if wanted.what == "speed":
        found: Any = speed(wanted.requests)
    elif wanted.what == "papers":
        found = papers()
    elif wanted.what == "search":
        found = section_5_4(wanted.cells, most=wanted.most)
    elif wanted.profile is None or not wanted.runs:
        parser.error("measured needs --profile FILE and directories of runs")
    else:
        profile = Profile.read(wanted.profile)
        found = measured(wanted.runs, profile, wanted.interference, wanted.pixels, wanted.cores)
    text = json.dumps(found, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"planner-{wanted.what}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
