"""The planner against the papers and against the clock.

python -m benchmarks.planner speed                      # 100,000 requests on 64 instances
python -m benchmarks.planner papers                     # EPD-Serve's table 5 and figure 17
python -m benchmarks.planner search [--cells N]         # TriInfer's section 5.4, 15 cells

"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.common import RESULTS, argument_parser
from benchmarks.shapes import SHAREGPT_4O, WorkloadShape
from device.datasheets import spec_of
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.pools import Fleet, Pool
from epd_serve.plan.space import Candidate, three_methods
from epd_serve.plan.strategies import Found, enumerate_plans, ranked
from epd_serve.sim.records import attains
from epd_serve.sim.simulator import Outcome, build, check_books, simulate
from epd_serve.sim.spec import Batching
from epd_serve.topology import parse_topology
from epd_serve.types import Stage

#: EPD-Serve, table 5: openPangu-7B-VL, ShareGPT-4o, 10 requests/s: TTFT and TPOT in ms, attainment,
#: effective tokens/s per NPU. Monolithic engines take turns between tower and language model.
TABLE_5 = {
    "2EPD": (658.27, 95.56, 0.0215, 13.38),
    "2(E-PD)": (548.32, 62.22, 0.0313, 19.70),
    "EP-D": (5523.82, 27.31, 0.0820, 21.54),
    "(E-P)-D": (2386.85, 28.40, 0.2617, 77.36),
    "(E-D)-P": (651.86, 50.71, 0.2266, 69.18),
    "E-P-D": (557.89, 28.92, 0.9434, 192.70),
}
#: Requests/s in all, that the table's own columns imply: effective tokens/s * NPUs / (64 * attainment) is 19.4,
#: 19.7, 8.2, 9.2, 9.5 and 9.6. So a monolithic NPU had 10 requests/s, one of EP-D 5 and one of E-P-D 3.3.
RATES = {"2EPD": 20, "2(E-PD)": 20, "EP-D": 10, "(E-P)-D": 10, "(E-D)-P": 10, "E-P-D": 10}
#: In vLLM a monolithic instance's tower and language model take turns.
TAKE_TURNS = ("2EPD", "EP-D")
#: TriInfer, appendix A, table 5: model, data set, TTFT and TBT limits in seconds.
TRIINFER_SLOS = [
    ("llava-1.5-7b", "vizwiz", 4, 0.08),
    ("llava-1.5-7b", "textvqa", 4, 0.08),
    ("llava-1.5-7b", "mme", 4, 0.08),
    ("llava-1.5-7b", "pope", 4, 0.08),
    ("llava-1.5-7b", "textcaps", 4, 0.08),
    ("llava-next-7b", "vizwiz", 8, 0.60),
    ("llava-next-7b", "textvqa", 8, 0.60),
    ("llava-next-7b", "mme", 8, 0.60),
    ("llava-next-7b", "pope", 8, 0.30),
    ("llava-next-7b", "textcaps", 8, 0.30),
    ("qwen2-vl-7b", "vizwiz", 8, 0.60),
    ("qwen2-vl-7b", "textvqa", 8, 0.60),
    ("qwen2-vl-7b", "mme", 8, 0.60),
    ("qwen2-vl-7b", "pope", 8, 0.10),
    ("qwen2-vl-7b", "textcaps", 8, 0.10),
]
#: The paper prints no lengths: these are what the tasks are like (yes or no, a few words, a caption).
DATA_SETS = {
    "vizwiz": WorkloadShape(name="vizwiz", width=960, height=960, num_text_tokens=30, num_output_tokens=30),
    "textvqa": WorkloadShape(name="textvqa", width=950, height=820, num_text_tokens=25, num_output_tokens=20),
    "mme": WorkloadShape(name="mme", width=800, height=700, num_text_tokens=35, num_output_tokens=5),
    "pope": WorkloadShape(name="pope", width=640, height=480, num_text_tokens=25, num_output_tokens=3),
    "textcaps": WorkloadShape(name="textcaps", width=950, height=820, num_text_tokens=25, num_output_tokens=60),
}


def figures(outcome: Outcome, num_devices: int, ttft_s: float, tpot_s: float) -> dict[str, float]:
    jobs = outcome.jobs
    ttfts = [job.first_token_s - job.sent_s for job in jobs if job.first_token_s is not None]
    tpots = [
        (job.last_token_s - job.first_token_s) / (job.num_output - 1)
        for job in jobs
        if job.last_token_s is not None and job.first_token_s is not None and job.num_output > 1
    ]
    good = [job for job in jobs if attains(job, ttft_s, tpot_s)]
    return {
        "ttft_ms": 1e3 * sum(ttfts) / len(ttfts),
        "tpot_ms": 1e3 * sum(tpots) / len(tpots),
        "attainment": len(good) / len(jobs),
        "effective_per_npu": sum(job.num_output for job in good) / outcome.seconds / num_devices,
        "throughput_per_npu": sum(job.num_output for job in jobs) / outcome.seconds / num_devices,
    }


def table_5(
    factor: float = 1.0, *, per_npu: float | None = None, num_requests: int = 512, seed: int = 0
) -> dict[str, dict[str, float]]:
    """All six deployments at ``factor`` times the paper's rates (or at one rate per NPU), with openPangu-7B-VL's
    place taken by Qwen2.5-VL-7B, whose feature sizes table 3 of the paper has."""
    profile = analytic_profile(shape_of("qwen2.5-vl-7b"), spec_of("ascend-910b3"))
    measured: dict[str, dict[str, float]] = {}
    for line in TABLE_5:
        topology = parse_topology(line)
        deployment = build(
            topology,
            [f"npu:{i}" for i in range(topology.num_devices)],
            lambda device, width: profile,
            batching=Batching(policy="unlimited", max_num_seqs=256, max_num_tokens=8192),
            dual_stream=line not in TAKE_TURNS,
        )
        rate = factor * RATES[line] if per_npu is None else per_npu * topology.num_devices
        requests = SHAREGPT_4O.requests(num_requests, rate, seed)
        outcome = simulate(deployment, requests)
        measured[line] = figures(outcome, topology.num_devices, 2.0, 0.05)
    return measured


def winners(measured: dict[str, dict[str, float]]) -> dict[str, str]:
    """Figure 17: who is first in what."""
    return {
        "lowest TTFT": min(measured, key=lambda line: measured[line]["ttft_ms"]),
        "lowest TPOT": min(measured, key=lambda line: measured[line]["tpot_ms"]),
        "throughput": max(measured, key=lambda line: measured[line]["throughput_per_npu"]),
        "attainment": max(measured, key=lambda line: measured[line]["attainment"]),
    }


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def exhaustive(evaluator: Evaluator, candidates: Sequence[Candidate]) -> Found:
    """Search every plan's goodput. Raises ValueError where no plan serves anything."""
    return ranked(evaluator, "exhaustive", [evaluator.evaluate(one) for one in candidates], len(candidates))


def three_layouts(evaluator: Evaluator, num_instances: int) -> list[Candidate]:
    """The layouts that TriInfer's algorithm 2 replays: E, P and D apart, EP and D, ED and P.

    Their counts go by the time that the trace takes each stage at full batches (lines 1 to 12). Raises ValueError
    for less than three instances: the partition gives each stage one.
    """
    if num_instances < 3:
        raise ValueError(f"algorithm 2 gives each stage an instance, and {num_instances} are too few for three")
    whole = Candidate(line=f"{num_instances - 2}E-P-D", pools=((0, num_instances),))
    loads = evaluator.bound(whole).loads
    e, p, d = partition(num_instances, [loads.get(stage, 0.0) for stage in Stage])
    lines = [f"{e}E-{p}P-{d}D", f"{e + p}EP-{d}D", f"{e + d}ED-{p}P"]
    return [Candidate(line=str(Candidate(line=line, pools=()).topology), pools=whole.pools) for line in lines]


def algorithm_2(evaluator: Evaluator, num_instances: int) -> Found:
    """TriInfer's algorithm 2, unchanged: a replay of the trace for each of its layouts (lines 13 to 22)."""
    plans = three_layouts(evaluator, num_instances)
    return ranked(evaluator, "algorithm 2", [evaluator.evaluate(one) for one in plans], len(plans))


def partition(total: int, times: Sequence[float]) -> list[int]:
    """Line 12: ``total`` in the ratio of times, rounded, at least one each; what rounding leaves goes by largest
    remainder."""
    whole = sum(times)
    exact = [total * time / whole if whole else total / len(times) for time in times]
    counts = [max(math.floor(value), 1) for value in exact]
    while sum(counts) < total:
        index = max(range(len(counts)), key=lambda i: exact[i] - counts[i])
        counts[index] += 1
    while sum(counts) > total:
        index = min((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: exact[i] - counts[i])
        counts[index] -= 1
    return counts


def section_5_4(num_cells: int = len(TRIINFER_SLOS), *, most: int = 250) -> list[dict[str, Any]]:
    """TriInfer's 35 strategies on 8 H20 for its models and data sets: where the heuristic and the enumeration end
    up among all of them.

    Its limits on TTFT are seconds; a tenth of them is taken, and limits on TBT as they are. A simulation has to
    be several times as long as the limit, else queues have no time to grow, and 8 devices take hundreds of
    requests in a second.
    """
    cells: list[dict[str, Any]] = []
    for model, data_set, ttft_s, tbt_s in TRIINFER_SLOS[:num_cells]:
        known = "llava-1.5-7b" if model == "llava-next-7b" else model
        shape = DATA_SETS[data_set]
        if model == "llava-next-7b":  # four tiles and the whole
            shape = WorkloadShape(
                name=data_set,
                num_images=5,
                num_text_tokens=shape.num_text_tokens,
                num_output_tokens=shape.num_output_tokens,
            )
        pool = Pool(device="h20", kind="cuda", count=8, price=1.0, shape=shape_of(known))
        fleet = Fleet(model=model, pools=(pool,))
        plans = [Candidate(line=line, pools=((0, 8),)) for line in three_methods(8)]

        goal = Goal(ttft_s=ttft_s / 10, tpot_s=tbt_s)
        requests = shape.requests(most, 10, seed=0)
        evaluator = partial(Evaluator, fleet, goal, requests, least=80, most=most)
        began = time.process_time()
        every = evaluator()
        all_of_them = exhaustive(every, plans)
        goodputs = {one.candidate.line: one.goodput for one in all_of_them.ranking}
        cell: dict[str, Any] = {"model": model, "data_set": data_set, "simulations": every.num_simulations}
        for name in ("algorithm 2", "enumerate"):
            judge = evaluator()
            best = (algorithm_2(judge, 8) if name == "algorithm 2" else enumerate_plans(judge, plans)).best
            goodput = goodputs[best.candidate.line]
            cell[name] = {
                "plan": best.candidate.line,
                "rank": 1 + sum(value > goodput * 1.02 for value in goodputs.values()),
                "of_best": goodput / all_of_them.best.goodput,
                "simulations": judge.num_simulations,
                "requests_part": judge.num_requests / every.num_requests,
            }
        cell["best"] = all_of_them.best.candidate.line
        cell["goodput"] = all_of_them.best.goodput
        cell["cpu_s"] = time.process_time() - began
        cells.append(cell)
        print(cell, flush=True)
    return cells


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
    parser = argument_parser(__doc__)
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
