"""TriInfer and HydraInfer (000, 002), figure 9 (figure 10 of 002): share of requests within the limits over the
rate, and goodput: the highest rate of a GPU at which nine in ten are within them.

LLaVA-1.5-7B and TextCaps, for which the paper compares with vLLM, on H20s; four instead of 32. Requests come at
random times, for the paper's trace of arrivals is not here. Runs last 2.5 seconds of the paper's clock, in which
no queue grows to its limit of 4 s on TTFT: goodput is by a tenth of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.papers.measure import Deployment, Limits, Load, Rows, markdown, sheet
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.pools import read_fleet
from epd_serve.plan.space import Candidate
from epd_serve.sim.workloads import read_load
from epd_serve.topology import parse_topology
from epd_serve.types import Stage

DEVICE, SHAPE, NUM_GPUS, SLOWNESS = "h20", "llava-1.5-7b", 4, 8.0
#: Appendix A, table 5; and with a tenth of its first.
PAPERS_LIMITS = Limits(ttft_ms=4000, tpot_ms=80, of_gaps=True)
LIMITS = Limits(ttft_ms=400, tpot_ms=80, of_gaps=True)
TARGET = 0.9
SECONDS = 20.0
#: Requests a second and GPU: by the data sheet E-2P-D can do 8 of them, 3EP-D 12 and a monolithic one 14.
RATES = (7, 10, 13)
#: TextCaps: the paper prints no lengths; a short question, and a caption.
WORKLOAD = "synthetic,image_share=1,image_size=950x820,text_tokens=25,output_tokens=60"
#: Section 5.2: vLLM takes requests in turn.
VLLM, STAGE_LEVEL = "vLLM-like: 4EPD", "4EPD, stage-level batches"
#: TriInfer against vLLM: 1.3 to 3.7 times for this model, up to 2.4 times on TextCaps.
PAPER = "1.3 to 3.7 for LLaVA-1.5-7B (002: 1.5 to 4), up to 2.4 on TextCaps"


def layouts() -> list[str]:
    """Return the layouts that TriInfer's algorithm 2 replays: E, P and D apart, EP and D, ED and P.

    Their counts go by the time that the load takes each stage at full batches (lines 1 to 12).
    """
    fleet = read_fleet(f"emulated:{DEVICE} x {NUM_GPUS}", SHAPE)
    goal = Goal(ttft_s=LIMITS.ttft_ms / 1e3, tpot_s=LIMITS.tpot_ms / 1e3)
    judge = Evaluator(fleet, goal, read_load(WORKLOAD, rate=10.0, count=250, seed=0).requests)
    loads = judge.bound(Candidate(line=f"{NUM_GPUS - 2}E-P-D", pools=((0, NUM_GPUS),))).loads
    e, p, d = partition(NUM_GPUS, [loads.get(stage, 0.0) for stage in Stage])
    return [str(parse_topology(line)) for line in (f"{e}E-{p}P-{d}D", f"{e + p}EP-{d}D", f"{e + d}ED-{p}P")]


def partition(total: int, times: Sequence[float]) -> list[int]:
    """Divide ``total`` in the ratio of times (line 12): at least one each; the largest remainders get the rest."""
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


def deployments() -> list[Deployment]:
    loads = tuple(
        Load(
            name=f"{rate}/s per GPU",
            workload=WORKLOAD,
            num_requests=round(rate * NUM_GPUS / SLOWNESS * SECONDS),
            rate=rate * NUM_GPUS,
            limits=(LIMITS, PAPERS_LIMITS),
        )
        for rate in RATES
    )

    def deployment(name: str, topology: str, *, sized: bool = True, turns: bool = False) -> Deployment:
        return Deployment(
            name=name,
            topology=topology,
            devices=(sheet(SHAPE, DEVICE, turns=turns),) * NUM_GPUS,
            shape=SHAPE,
            slowness=SLOWNESS,
            loads=loads,
            slo=LIMITS if sized else None,
            options={} if sized else {"gateway": {"routing": "round_robin"}},
        )

    whole = f"{NUM_GPUS}EPD"
    return [
        deployment(VLLM, whole, sized=False, turns=True),
        deployment(STAGE_LEVEL, whole),
        *(deployment(line, line) for line in layouts()),
    ]


def goodput(attained: Mapping[float, float]) -> tuple[float, bool]:
    """The rate at which :data:`TARGET` is crossed, on a line between two measured ones, and whether it is.

    Where it is not, the rate is the lowest, and goodput is below it, or the highest, and goodput is not below it.
    """
    rates = sorted(attained)
    good = [rate for rate in rates if attained[rate] >= TARGET]
    if not good or good[-1] == rates[-1]:
        return (good or rates[:1])[-1], False
    low = good[-1]
    high = rates[rates.index(low) + 1]
    part = (attained[low] - TARGET) / (attained[low] - attained[high])
    return low + part * (high - low), True


def _curves(rows: Rows, limits: Limits) -> dict[str, dict[float, float]]:
    """For each deployment the share within the limits by the rate of a GPU."""
    curves: dict[str, dict[float, float]] = {}
    for (name, _), row in rows.items():
        curves.setdefault(name, {})[row["rate"] / NUM_GPUS] = row["attained"][str(limits)]
    return curves


def report(rows: Rows) -> str:
    curves, papers = _curves(rows, LIMITS), _curves(rows, PAPERS_LIMITS)
    lines = []
    for name, attained in curves.items():
        wide = papers[name]
        found, is_known = goodput(attained)
        before, was_known = goodput(curves[VLLM]) if VLLM in curves else (0.0, False)
        idle = [row["host_idle"] for (one, _), row in rows.items() if one == name]
        lines.append(
            [
                f"`{name}`",
                *(f"{attained[rate]:.0%}, {wide[rate]:.0%}" if rate in attained else "-" for rate in RATES),
                f"{found:.1f}" if is_known else f"{'<' if attained[found] < TARGET else '>='} {found:g}",
                f"{found / before:.2f}" if is_known and was_known else "-",
                f"{min(idle):.0%}",
            ]
        )
    head = [f"within {LIMITS}, {PAPERS_LIMITS} ms", *(f"{rate}/s per GPU" for rate in RATES)]
    head += [f"goodput per GPU within {LIMITS} ms", "of vLLM-like's", "least host idle"]
    return f"{markdown(head, lines)}\nThe paper's gain: {PAPER}.\n"
