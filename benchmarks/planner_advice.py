"""Whether measurement agrees where the planner advises against disaggregation.

    python -m benchmarks.planner_advice take WORK_DIR
    python -m benchmarks.planner_advice judge WORK_DIR --profile PROFILE.json

``take`` measures two monolithic instances and disaggregated deployments of the same two devices, one thread each,
under a text-heavy and an image-light load. ``judge`` has the planner choose among all plans for two such devices,
given the same requests and a profile that was measured apart from them, and compares.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.planner_measured import RESULTS, figures, goodput, is_good, sim_requests
from benchmarks.planner_runs import TPOT_MS, TTFT_MS, MeasuredRun, kept, make_runs_model
from epd_serve.bench.run_directory import RunDirectory
from epd_serve.config import DeploymentConfig
from epd_serve.cost.profile import Profile
from epd_serve.cost.shape import shape_of
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.explain import recommend
from epd_serve.plan.pools import Fleet, Pool
from epd_serve.plan.space import candidates
from epd_serve.plan.strategies import exhaustive

TOPOLOGIES = ("2EPD", "EP-D", "E-PD")
LOADS = {
    "text-heavy": "synthetic,text_tokens=lognormal:96:64,output_tokens=96,image_share=0",
    "image-light": "synthetic,text_tokens=lognormal:96:64,output_tokens=96,image_share=0.1,image_size=224x224",
}


def take(work_dir: Path, rates: str, duration_s: float, seed: int) -> None:
    model = work_dir / "model"
    if not (model / "config.json").exists():
        make_runs_model(model)
    files = []
    for topology in TOPOLOGIES:
        config = DeploymentConfig.model_validate(
            {"topology": topology, "model": str(model), "devices": ["cpu", "cpu"], "instances": {"threads": 1}}
        )
        files.append(work_dir / f"{topology}.yaml")
        files[-1].write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
    for name, workload in LOADS.items():
        command = ["bench", "--compare", ",".join(map(str, files)), "--workload", workload]
        command += ["--rates", rates, "--duration", str(duration_s), "--seed", str(seed), "--no-report"]
        command += ["--slo-ttft-ms", str(TTFT_MS), "--slo-tpot-ms", str(TPOT_MS)]
        command += ["--work-dir", str(work_dir / "advice" / name)]
        subprocess.run([sys.executable, "-m", "epd_serve.cli", *command], check=True)


def measured(work_dir: Path, load: str) -> dict[str, list[MeasuredRun]]:
    """By topology, rates rising."""
    found = [RunDirectory.open(file.parent) for file in (work_dir / "advice" / load).glob("*/*/*/run.json")]
    runs = sorted((kept(run, "") for run in found), key=lambda one: (one.topology, one.rate))
    return {topology: list(some) for topology, some in groupby(runs, key=lambda one: one.topology)}


def judge(work_dir: Path, profile: Profile) -> dict[str, Any]:
    shape = shape_of(str(work_dir / "model"))
    pool = Pool(device="cpu", kind="cpu", count=2, price=1.0, shape=shape, measured=profile)
    fleet = Fleet(model=str(work_dir / "model"), pools=(pool,))
    found: dict[str, Any] = {}
    for load in LOADS:
        runs = measured(work_dir, load)
        requests = sim_requests(max(runs["2EPD"], key=lambda one: len(one.requests)), profile)
        goal = Goal(ttft_s=TTFT_MS / 1e3, tpot_s=TPOT_MS / 1e3)
        evaluator = Evaluator(fleet, goal, requests, most=500)
        advice = recommend(evaluator, exhaustive(evaluator, list(candidates(fleet))), model=fleet.model)
        planned = {str(one.candidate): one.goodput for one in advice.ranking}
        rows = {}
        for topology, some in runs.items():
            rates = [{"rate": run.rate, "measured": figures(run.requests)} for run in some]
            rows[topology] = {
                "good_requests": sum(is_good(one) for run in some for one in run.requests),
                "requests": sum(len(run.requests) for run in some),
                "goodput": goodput(rates, "measured"),
                "planned_goodput": planned.get(topology),
                "rates": rates,
            }
        best = max(rows, key=lambda topology: rows[topology]["good_requests"])
        found[load] = {
            "workload": LOADS[load],
            "recommended": str(advice.chosen.candidate),
            "reasons": advice.reasons,
            "best_measured": best,
            "agrees": best == str(advice.chosen.candidate),
            "measured": rows,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["take", "judge"])
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--rates", default="3,5,7,9")
    parser.add_argument("--duration", type=float, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, default=RESULTS / "profile-runs-cpu.json")
    wanted = parser.parse_args()
    if wanted.what == "take":
        take(wanted.work_dir, wanted.rates, wanted.duration, wanted.seed)
        return
    found = judge(wanted.work_dir, Profile.read(wanted.profile))
    (RESULTS / "planner-advice.json").write_text(json.dumps(found, indent=1) + "\n")
    for load, one in found.items():
        print(f"{load}: planner says {one['recommended']}, measured best {one['best_measured']}")
        for topology, row in one["measured"].items():
            print(
                f"  {topology:6} good {row['good_requests']} of {row['requests']}, "
                f"goodput {row['goodput']:.2f}/s, "
                f"planned {row['planned_goodput']}"
            )
        print("  " + " ".join(one["reasons"]))


if __name__ == "__main__":
    main()
