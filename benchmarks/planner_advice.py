"""Whether measurement agrees where the planner advises against disaggregation.

    python -m benchmarks.planner_advice take WORK_DIR
    python -m benchmarks.planner_advice judge WORK_DIR --profile PROFILE.json

``take`` measures two monolithic instances and disaggregated deployments of the same two devices, one thread each,
under a text-heavy and an image-light load, with steps sized by the limits and without. ``judge`` has the planner
choose among all plans for two such devices, given the same requests and a profile that was measured apart from
them, and compares.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, argument_parser, write
from benchmarks.planner_measured import figures, goodput, is_good, sim_requests
from benchmarks.planner_runs import TPOT_MS, TTFT_MS, MeasuredRun, kept, make_runs_model
from epd_serve.bench.run_directory import RunDirectory
from epd_serve.config import DeploymentConfig
from epd_serve.cost.profile import Profile
from epd_serve.cost.shape import shape_of
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.explain import recommend
from epd_serve.plan.pools import Fleet, Pool
from epd_serve.plan.space import POLICIES, Candidate, candidates, with_batching
from epd_serve.plan.strategies import exhaustive

PLANS = [
    Candidate(line=line, pools=((0, 2),), policy=policy)
    for policy in POLICIES
    for line in ("2EPD", "EP-D", "E-PD")
]
LOADS = {
    "text-heavy": "synthetic,text_tokens=lognormal:96:64,output_tokens=96,image_share=0",
    "image-light": "synthetic,text_tokens=lognormal:96:64,output_tokens=96,image_share=0.1,image_size=224x224",
}


def take(work_dir: Path, rates: str, duration_s: float, seed: int) -> None:
    model = work_dir / "model"
    if not (model / "config.json").exists():
        make_runs_model(model)
    for plan in PLANS:
        config = DeploymentConfig.model_validate(
            {
                "topology": plan.line,
                "model": str(model),
                "devices": ["cpu", "cpu"],
                "slo": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS},
                "instances": {"threads": 1, "batching": {"policy": plan.policy}},
            }
        )
        file = _file(work_dir, plan)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
    for name, workload in LOADS.items():
        for policy in POLICIES:
            files = [str(_file(work_dir, plan)) for plan in PLANS if plan.policy == policy]
            command = ["bench", "--compare", ",".join(files), "--workload", workload]
            command += ["--rates", rates, "--duration", str(duration_s), "--seed", str(seed), "--no-report"]
            command += ["--slo-ttft-ms", str(TTFT_MS), "--slo-tpot-ms", str(TPOT_MS)]
            command += ["--work-dir", str(work_dir / "advice" / name / policy)]
            subprocess.run([sys.executable, "-m", "epd_serve.cli", *command], check=True)


def _file(work_dir: Path, plan: Candidate) -> Path:
    """The deployment file of a plan."""
    return work_dir / plan.policy / f"{plan.line}.yaml"


def measured(work_dir: Path, load: str) -> dict[Candidate, list[MeasuredRun]]:
    """The runs of each plan, rates rising."""
    found: dict[Candidate, list[MeasuredRun]] = {plan: [] for plan in PLANS}
    for policy in POLICIES:
        files = (work_dir / "advice" / load / policy).glob("*/*/*/run.json")
        for run in sorted((kept(RunDirectory.open(file.parent), "") for file in files), key=lambda run: run.rate):
            found[Candidate(line=run.topology, pools=((0, 2),), policy=policy)].append(run)
    return found


def judge(work_dir: Path, profile: Profile) -> dict[str, Any]:
    shape = shape_of(str(work_dir / "model"))
    pool = Pool(device="cpu", kind="cpu", count=2, price=1.0, shape=shape, measured=profile)
    fleet = Fleet(model=str(work_dir / "model"), pools=(pool,))
    found: dict[str, Any] = {}
    for load in LOADS:
        runs = measured(work_dir, load)
        requests = sim_requests(max(runs[PLANS[0]], key=lambda one: len(one.requests)), profile)
        goal = Goal(ttft_s=TTFT_MS / 1e3, tpot_s=TPOT_MS / 1e3)
        evaluator = Evaluator(fleet, goal, requests, most=500)
        every = with_batching(candidates(fleet))
        advice = recommend(evaluator, exhaustive(evaluator, every))
        planned = {one.candidate: one.goodput for one in advice.ranking}
        rows: dict[Candidate, dict[str, Any]] = {}
        for plan, some in runs.items():
            rates = [{"rate": run.rate, "measured": figures(run.requests)} for run in some]
            rows[plan] = {
                "good_requests": sum(is_good(one) for run in some for one in run.requests),
                "requests": sum(len(run.requests) for run in some),
                "goodput": goodput(rates, "measured"),
                "planned_goodput": planned[plan],
                "rates": rates,
            }
        best, chosen = max(rows, key=lambda plan: rows[plan]["good_requests"]), advice.chosen.candidate
        found[load] = {
            "workload": LOADS[load],
            "recommended": str(chosen),
            "reasons": [*advice.answer, *advice.reasons],
            "best_measured": str(best),
            "agrees": best.line == chosen.line,
            "measured": {str(plan): row for plan, row in rows.items()},
        }
    return found


def main() -> None:
    parser = argument_parser(__doc__)
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
    write(RESULTS / "planner-advice.json", found)
    for load, one in found.items():
        print(f"{load}: planner says {one['recommended']}, measured best {one['best_measured']}")
        for plan, row in one["measured"].items():
            print(
                f"  {plan:14} good {row['good_requests']} of {row['requests']}, "
                f"goodput {row['goodput']:.2f}/s, "
                f"planned {row['planned_goodput']}"
            )
        print("  " + " ".join(one["reasons"]))


if __name__ == "__main__":
    main()
