"""The planner's simulator against deployments on emulated devices: the real gateway, scheduler, engine loop,
transfers and router, with a profile's times in place of the chips.

    python -m benchmarks.plan_emulated [--minutes 10] [--topologies 3EPD,E-P-D] [--bound 8]

Each deployment is the file that ``epd-serve plan`` would write. Its goodput, the highest rate at which nine in
ten requests keep both limits, is found by bisection, which begins at the simulator's; so is the simulator's, with
requests that are as many. At each rate, and at half the simulated goodput, the simulator also gets the very
requests that were sent. Both sides have the same device times, so that a difference is of queues, hand-overs or
the host, of which the simulator knows nothing here: not HTTP, not the decoding of pictures. ``host_busy`` is the
share of its cores that were busy, without what ran at a lower priority: where it comes near 1 the run shows the
host, not the deployment. So devices are slower than their data sheets, limits as much wider and links as much
slower: by the factor that brings the bound of monolithic instances down to ``--bound`` requests a second.

Each run is in the output when it is done, and is not made again: called again, the command goes on. With
``--minutes`` no run begins behind them.
"""

from __future__ import annotations

import io
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

from benchmarks.common import argument_parser, machine, slowed, typed, write
from benchmarks.loads import run_load
from epd_serve.bench.deployed import Candidate as Deployed
from epd_serve.bench.deployed import deployed
from epd_serve.bench.plan import take_items
from epd_serve.bench.types import Item, Media, Record
from epd_serve.bench.workloads import load_workload
from epd_serve.config import load_config
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import emulated_profile
from epd_serve.plan.evaluate import TARGET, Evaluation, Evaluator, Goal
from epd_serve.plan.explain import deployment_yaml
from epd_serve.plan.pools import read_fleet
from epd_serve.plan.space import Candidate
from epd_serve.sim.simulator import Job, simulate
from epd_serve.sim.workloads import SimRequest, read_load
from epd_serve.topology import parse_topology

#: Up to this share of the bound a point counts as below saturation.
BELOW = 0.75
#: Two rates whose ratio is smaller are the same to a search of goodput.
PRECISION = 1.07
#: Limits on TTFT and TPOT at the speed of the data sheet, in seconds: some times what an idle device needs.
LIMITS_S = {"ascend-910b3": (0.5, 0.05), "h200": (0.2, 0.025)}
WORKLOADS, MODEL = ("sharegpt4o-like", "visualwebinstruct-like"), "qwen2.5-vl-7b"
#: Of each run, at least.
REQUESTS = 80
TOPOLOGIES = "3EPD,E-P-D,E-2PD,EP-2D,ED-2P,2E-PD,2EP-D,2ED-P,3(E-PD)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One deployment under one workload."""

    topology: str
    device: str
    workload: str
    bound: float

    def __str__(self) -> str:
        return f"{self.device} {self.workload} {self.topology}"


def deployment_of(cell: Cell, directory: Path) -> tuple[float, Evaluator, Candidate, str]:
    """The factor by which devices are slower, the simulated deployment, and the file of the same."""
    count = parse_topology(cell.topology).num_devices
    ttft_s, tpot_s = LIMITS_S[cell.device]
    requests = read_load(cell.workload, rate=1.0, count=400, seed=0).requests
    real = Evaluator(
        read_fleet(f"emulated:{cell.device} x {count}", MODEL), Goal(ttft_s=ttft_s, tpot_s=tpot_s), requests
    )
    monolithic = Candidate(line=f"{count}EPD", pools=((0, count),))
    slowness = max(real.bound(monolithic).rate / cell.bound, 1.0)
    profile = directory / f"{cell.device}.json"
    profile.write_bytes(slowed(emulated_profile(MODEL, cell.device), slowness).to_json())
    fleet = read_fleet(f"emulated:{profile} x {count}", MODEL)
    judge = Evaluator(fleet, Goal(ttft_s=ttft_s * slowness, tpot_s=tpot_s * slowness), requests)
    plan = Candidate(line=cell.topology, pools=((0, count),))
    found = Evaluation(candidate=plan, goodput=0.0, objective=0.0, cost=0.0, bound=judge.bound(plan))
    return slowness, judge, plan, deployment_yaml(judge, found)


def next_rate(attained: dict[float, float], bound: float, guess: float) -> float | None:
    """The rate to look at next; None where the goodput is known. A right guess costs two looks.

    Args:
        attained: share of requests that kept the limits, by rate.
        bound: where the first device is always busy; no more lasts, whatever a short run says.
        guess: of the goodput.
    """
    if not attained:
        return guess / math.sqrt(PRECISION)
    good = goodput(attained)
    bad = min((rate for rate, share in attained.items() if share < TARGET and rate > good), default=bound)
    if not good:
        return bad / 1.2 if bad > 0.01 * bound else None
    if bad < 1.01 * PRECISION * good:
        return None
    return PRECISION * good if len(attained) == 1 else math.sqrt(good * bad)


def goodput(attained: dict[float, float]) -> float:
    return max((rate for rate, share in attained.items() if share >= TARGET), default=0.0)


def simulated_share(judge: Evaluator, plan: Candidate, rate: float) -> float:
    """The share of simulated requests that keep both limits."""
    outcome = judge.simulate(plan, rate, num_requests(judge, rate))
    return outcome.attainment(judge.goal.ttft_s, judge.goal.tpot_s).value


def num_requests(judge: Evaluator, rate: float) -> int:
    """Of a run: queues must have time to grow."""
    return max(REQUESTS, math.ceil(rate * judge.horizon_s))


def searched(share: Callable[[float], float], bound: float) -> float:
    attained: dict[float, float] = {}
    while (rate := next_rate(attained, bound, 0.7 * bound)) is not None:
        attained[rate] = share(rate)
    return goodput(attained)


def figures(times: Times, tokens: int, seconds: float) -> dict[str, float]:
    ttft_s, tpot_s = zip(*times, strict=True)
    return {"ttft_s": fmean(ttft_s), "tpot_s": fmean(tpot_s), "throughput": tokens / seconds}


Times = list[tuple[float, float]]


def measured(answered: Sequence[Record]) -> tuple[dict[str, float], Times]:
    """Figures, and TTFT and TPOT of each."""
    times = [(one.ttft_s or 0.0, one.tpot_s or 0.0) for one in answered]
    tokens = sum(one.num_output_tokens for one in answered)
    return figures(times, tokens, max(one.finish_s for one in answered) - begin_of(answered)), times


def begin_of(records: Sequence[Record]) -> float:
    return min(one.sent_s for one in records if one.sent_s is not None)


def sim_requests(answered: Sequence[Record], items: Sequence[Item], profile: Profile) -> list[SimRequest]:
    """The same requests for the simulator, in the order in which they were sent; no image comes twice."""
    begin_s, found = begin_of(answered), []
    for one in sorted(answered, key=lambda one: one.sent_s or 0.0):
        pixels = num_pixels(items[one.index])
        num_image_tokens = profile.image_tokens(pixels) if pixels else 0
        found.append(
            SimRequest(
                at_s=(one.sent_s or 0.0) - begin_s,
                images=((str(one.index), pixels),) if pixels else (),
                num_text_tokens=max((one.num_prompt_tokens or 0) - num_image_tokens, 1),
                num_output_tokens=one.num_output_tokens,
            )
        )
    return found


def num_pixels(item: Item) -> int:
    media = [part for message in item.messages for part in message.parts if isinstance(part, Media)]
    return sum(math.prod(Image.open(io.BytesIO(one.data)).size) for one in media)


def simulated(jobs: list[Job]) -> tuple[dict[str, float], Times]:
    times: Times = []
    for job in jobs:
        assert job.first_token_s is not None and job.last_token_s is not None and job.finish_s is not None
        tpot_s = (job.last_token_s - job.first_token_s) / max(job.num_output - 1, 1)
        times.append((job.first_token_s - job.sent_s, tpot_s))
    tokens = sum(job.num_output for job in jobs)
    return figures(times, tokens, max(job.finish_s or 0.0 for job in jobs)), times


def one_run(
    cell: Cell, judge: Evaluator, plan: Candidate, url: str, rate: float, directory: Path
) -> dict[str, Any]:
    """One rate, measured and simulated."""
    count, seed, workload = num_requests(judge, rate), round(1e3 * rate), load_workload(cell.workload)
    records, busy = run_load(
        url,
        workload,
        directory / "runs",
        workload=cell.workload,
        num_requests=count,
        seed=seed,
        arrivals="poisson",
        rate=rate,
        num_warmups=2,
        label=cell.topology,
    )
    answered = [one for one in records if one.succeeded]
    items = take_items(workload, count, seed)
    requests = sim_requests(answered, items, judge.fleet.pools[0].profile(1))
    outcome = simulate(judge.deployment(plan), requests)
    real, real_times = measured(answered)
    sim, sim_times = simulated(outcome.jobs)
    ttft_s, tpot_s = judge.goal.ttft_s or math.inf, judge.goal.tpot_s or math.inf
    attained, sim_attained = (
        sum(one[0] <= ttft_s and one[1] <= tpot_s for one in times) / len(records)
        for times in (real_times, sim_times)
    )
    return {
        "rate": rate,
        "below_saturation": rate <= BELOW * judge.bound(plan).rate,
        "failed": len(records) - len(answered),
        "attained": attained,
        "simulated_attained": sim_attained,
        "host_busy": busy,
        "measured": real,
        "simulated": sim,
        "error": {name: sim[name] / value - 1 for name, value in real.items()},
    }


def go_on(cell: Cell, row: dict[str, Any], until_s: float, save: Callable[[], object]) -> None:
    """Make the runs that a cell lacks, until its goodput is known or the time is up."""
    with tempfile.TemporaryDirectory(prefix="epd-serve-plan-") as name:
        directory = Path(name)
        row["slowness"], judge, plan, text = deployment_of(cell, directory)
        bound = judge.bound(plan).rate
        if "simulated" not in row["goodput"]:
            row["goodput"]["simulated"] = searched(lambda rate: simulated_share(judge, plan, rate), bound)
        attained = {run["rate"]: run["attained"] for run in row["runs"]}
        guess = row["goodput"]["simulated"] or 0.7 * bound
        file = directory / "deployment.yaml"
        file.write_text(text, encoding="utf-8")
        candidate = Deployed(file=file, label=cell.topology, config=load_config(file))
        with deployed(candidate, directory / "up.log") as url:

            def look(rate: float) -> dict[str, Any]:
                run = one_run(cell, judge, plan, url, rate, directory)
                errors = ", ".join(f"{name} {value:+.1%}" for name, value in run["error"].items())
                print(
                    f"{cell} {rate:.2f}/s ({rate / bound:.0%} of the bound, host {run['host_busy']:.0%}): "
                    f"{run['attained']:.0%} attained; simulated {errors}",
                    flush=True,
                )
                return run

            while (rate := next_rate(attained, bound, guess)) is not None:
                if time.monotonic() > until_s:
                    return
                row["runs"].append(look(rate))
                attained[rate] = row["runs"][-1]["attained"]
                save()
            row["light"] = look(guess / 2)
        row["goodput"]["measured"] = goodput(attained)
        save()


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def mean_errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the simulator's errors, without their signs, over the runs below saturation."""
    runs = [run for row in rows for run in (*row["runs"], row["light"]) if run["below_saturation"]]
    return {name: fmean(abs(run["error"][name]) for run in runs) for name in runs[0]["error"]}


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each device and workload all of whose cells are done: the rankings against each other."""
    found = []
    for device, workload in sorted({(row["device"], row["workload"]) for row in rows}):
        cells = [row for row in rows if (row["device"], row["workload"]) == (device, workload)]
        done = [row for row in cells if "measured" in row["goodput"]]
        if len(done) < len(cells) or len(done) < 2:
            continue
        real, sim = ([row["goodput"][side] for row in done] for side in ("measured", "simulated"))
        found.append(
            {
                "device": device,
                "workload": workload,
                "topologies": len(done),
                "errors_below_saturation": mean_errors(done),
                "kendall_tau": kendall_tau(real, sim),
                "advised": done[sim.index(max(sim))]["topology"],
                "advised_of_best": real[sim.index(max(sim))] / max(real),
                "largest_goodput_error": max(
                    abs(b / a - 1) if a else math.inf for a, b in zip(real, sim, strict=True)
                ),
            }
        )
    return found


def main() -> None:
    parser = argument_parser(__doc__, "plan-emulated.json")
    parser.add_argument("--topologies", default=TOPOLOGIES)
    parser.add_argument("--bound", type=float, default=8.0, help="of monolithic instances, in requests a second")
    parser.add_argument("--minutes", type=float, default=math.inf)
    wanted = parser.parse_args()
    until_s = time.monotonic() + 60 * wanted.minutes
    about = {"model": MODEL, "bound": wanted.bound, "requests": REQUESTS}
    content: dict[str, Any] = {**about, "cells": []}
    if wanted.output.exists():
        content = json.loads(wanted.output.read_text(encoding="utf-8"))
        if {name: content.get(name) for name in about} != about:
            raise SystemExit(f"{wanted.output} is of other options than {about}: take them, or another --output")
    rows = {(row["device"], row["workload"], row["topology"]): row for row in content["cells"]}
    cells = [
        Cell(topology=line, device=device, workload=workload, bound=wanted.bound)
        for device in LIMITS_S
        for workload in WORKLOADS
        for line in wanted.topologies.split(",")
    ]
    for cell in cells:
        key = {"device": cell.device, "workload": cell.workload, "topology": cell.topology}
        rows.setdefault((cell.device, cell.workload, cell.topology), {**key, "runs": [], "goodput": {}})

    def save() -> None:
        content.update(command=typed("plan_emulated"), machine=machine(), cells=list(rows.values()))
        content["verdicts"] = verdicts(content["cells"])
        write(wanted.output, content)

    for cell in cells:
        row = rows[cell.device, cell.workload, cell.topology]
        if "measured" not in row["goodput"] and time.monotonic() < until_s:
            go_on(cell, row, until_s, save)
    num_left = sum("measured" not in row["goodput"] for row in rows.values())
    print(f"{len(rows) - num_left} of {len(rows)} cells are done")
    for verdict in verdicts(list(rows.values())):
        print(json.dumps(verdict))


if __name__ == "__main__":
    main()
