"""The planner's simulator against deployments on emulated devices: the real gateway, scheduler, engine loop,
transfers and router, with the data sheet's times in place of the chips.

    python -m benchmarks.plan_emulated --topologies 3EPD,E-P-D,E-2PD,EP-2D --rates 2,4

Each deployment is the file that ``epd-serve plan`` would write, and the simulator gets the requests that were
sent. Both have the same device times, so that a difference is of queues, hand-overs or the host, of which the
simulator knows nothing here: not HTTP, not the decoding of pictures. ``host_busy`` is the share of its cores that
were busy: where it comes near 1 the run shows the host, not the deployment.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import psutil
from rich.console import Console

from benchmarks.common import argument_parser, machine, typed, write
from benchmarks.planner_measured import sim_requests
from benchmarks.planner_runs import Asked, kept
from epd_serve.bench.deployed import Candidate as Deployed
from epd_serve.bench.deployed import deployed
from epd_serve.bench.run_directory import RunDirectory, new_directory
from epd_serve.bench.session import Session
from epd_serve.bench.types import RunSettings
from epd_serve.bench.workloads import load_workload
from epd_serve.config import load_config
from epd_serve.plan.evaluate import Evaluation, Evaluator, Goal
from epd_serve.plan.explain import deployment_yaml
from epd_serve.plan.pools import read_fleet
from epd_serve.plan.space import Candidate
from epd_serve.sim.gateway import Job
from epd_serve.sim.simulator import simulate
from epd_serve.sim.traces import read_load
from epd_serve.topology import parse_topology

#: Up to this share of the bound a point counts as below saturation.
BELOW = 0.75


def deployment_of(line: str, device: str, model: str, workload: str) -> tuple[Evaluator, Candidate, str]:
    """The simulated deployment and the file of the same."""
    count = parse_topology(line).num_devices
    fleet = read_fleet(f"emulated:{device} x {count}", model)
    goal = Goal(ttft_s=2.0, tpot_s=0.1)
    judge = Evaluator(fleet, goal, read_load(workload, rate=1.0, count=200, seed=0).requests)
    plan = Candidate(line=line, pools=((0, count),))
    found = Evaluation(candidate=plan, goodput=0.0, objective=0.0, cost=0.0, bound=judge.bound(plan))
    return judge, plan, deployment_yaml(judge, found)


def figures(ttft_s: list[float], tpot_s: list[float], tokens: int, seconds: float) -> dict[str, float]:
    return {"ttft_s": fmean(ttft_s), "tpot_s": fmean(tpot_s), "throughput": tokens / seconds}


def measured(requests: list[Asked]) -> dict[str, float]:
    failed = [one for one in requests if not one.num_output_tokens]
    assert not failed, f"{len(failed)} requests failed"
    tokens = sum(one.num_output_tokens for one in requests)
    seconds = max(one.finish_s for one in requests)
    return figures([one.ttft_s for one in requests], [one.tpot_s for one in requests], tokens, seconds)


def simulated(jobs: list[Job]) -> dict[str, float]:
    ttft_s, tpot_s = [], []
    for job in jobs:
        assert job.first_token_s is not None and job.last_token_s is not None and job.finish_s is not None
        ttft_s.append(job.first_token_s - job.sent_s)
        tpot_s.append((job.last_token_s - job.first_token_s) / max(job.num_output - 1, 1))
    tokens = sum(job.num_output for job in jobs)
    return figures(ttft_s, tpot_s, tokens, max(job.finish_s or 0.0 for job in jobs))


def cell(
    line: str, device: str, model: str, workload: str, rates: list[float], num_requests: int, directory: Path
) -> list[dict[str, Any]]:
    """One deployment under one workload at all rates."""
    judge, plan, text = deployment_of(line, device, model, workload)
    file = directory / f"{line}.yaml"
    file.write_text(text, encoding="utf-8")
    profile = judge.fleet.pools[0].profile(1)
    limit = judge.bound(plan).rate
    session = Session(console=Console(stderr=True))
    rows: list[dict[str, Any]] = []
    with deployed(Deployed(file=file, label=line, config=load_config(file)), directory / f"{line}.log") as url:
        for number, rate in enumerate(rates):
            settings = RunSettings(
                base_url=url,
                model="",
                workload=workload,
                num_requests=num_requests,
                seed=number,
                arrivals="poisson",
                rate=rate,
                num_warmups=2,
                label=line,
            )
            psutil.cpu_percent()
            path = new_directory(directory / "runs")
            session.begin(path, settings, load_workload(workload))
            busy = psutil.cpu_percent() / 100
            run = kept(RunDirectory.open(path), line)
            outcome = simulate(judge.deployment(plan), sim_requests(run, profile))
            sides = {"measured": measured(run.requests), "simulated": simulated(outcome.jobs)}
            rows.append(
                {
                    "topology": line,
                    "device": f"emulated {device}",
                    "workload": workload,
                    "rate": rate,
                    "of_bound": rate / limit,
                    "below_saturation": rate <= BELOW * limit,
                    "host_busy": busy,
                    **sides,
                    "error": {
                        name: sides["simulated"][name] / value - 1 for name, value in sides["measured"].items()
                    },
                    "requests": [msgspec.to_builtins(one) for one in run.requests],
                }
            )
    return rows


def main() -> None:
    parser = argument_parser(__doc__, "plan-emulated.json")
    parser.add_argument("--topologies", default="3EPD,E-P-D,E-2PD,EP-2D,ED-2P,2E-PD,2EP-D,2ED-P,3(E-PD)")
    parser.add_argument("--devices", default="ascend-910b3,h200")
    parser.add_argument("--workloads", default="sharegpt4o-like,visualwebinstruct-like")
    parser.add_argument("--model", default="qwen2.5-vl-7b")
    parser.add_argument("--rates", default="2,4")
    parser.add_argument("--requests", type=int, default=60)
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for device in wanted.devices.split(","):
            for workload in wanted.workloads.split(","):
                for line in wanted.topologies.split(","):
                    rates = [float(rate) for rate in wanted.rates.split(",")]
                    work_dir = Path(directory) / device / workload
                    work_dir.mkdir(parents=True, exist_ok=True)
                    for row in cell(line, device, wanted.model, workload, rates, wanted.requests, work_dir):
                        rows.append(row)
                        errors = ", ".join(f"{name} {value:+.1%}" for name, value in row["error"].items())
                        ttft, tpot = (1e3 * row["measured"][name] for name in ("ttft_s", "tpot_s"))
                        print(
                            f"{device} {workload} {line} {row['rate']:g}/s ({row['of_bound']:.0%} of the bound, "
                            f"host {row['host_busy']:.0%}): TTFT {ttft:.1f} ms, TPOT {tpot:.2f} ms; "
                            f"simulated {errors}",
                            flush=True,
                        )
    write(
        wanted.output,
        {"command": typed("plan_emulated"), "machine": machine(), "model": wanted.model, "rows": rows},
    )


if __name__ == "__main__":
    main()
