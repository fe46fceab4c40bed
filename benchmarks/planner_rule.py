"""Over which loads disaggregation wins, in the simulator: goodput of the best disaggregated plan over that of
monolithic instances on the same devices.

    python -m benchmarks.planner_rule --png

A load is the size of its images, the share of requests that have one, and the length of the answers. Each is
searched under a loose and a tight limit on TPOT. Disaggregated plans have no monolithic instance. Loads that the
output has already are not searched again. The bounds of the rates, which need no simulation, are compared for more
devices, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import argument_parser, typed, write
from epd_serve.plan.evaluate import Evaluation, Evaluator, Goal
from epd_serve.plan.pools import read_fleet
from epd_serve.plan.space import Candidate, candidates, with_batching
from epd_serve.plan.strategies import enumerate_plans
from epd_serve.sim.workloads import read_load
from epd_serve.types import Stage

DEVICE, COUNT, MODEL = "ascend-910b3", 4, "qwen2.5-vl-7b"
TTFT_S = 2.0
#: An idle decode step of the model on the device takes 14 ms.
TPOTS_S = (0.1, 0.025)
SIDES = (0, 448, 896, 1792)
SHARES = (0.5,)
ANSWERS = (16, 64)
LONG = 256
TEXT_TOKENS = 64
#: Numbers of devices whose bounds are compared.
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """``side``: of the square images, in pixels; ``share``: of requests that have one."""

    side: int
    share: float
    num_output_tokens: int
    tpot_s: float


def mixes() -> Iterator[Mix]:
    for tpot_s in TPOTS_S:
        for answer in ANSWERS:
            for side in SIDES:
                share = 1.0 if side else 0.0
                yield Mix(side=side, share=share, num_output_tokens=answer, tpot_s=tpot_s)
            for share in SHARES:
                yield Mix(side=896, share=share, num_output_tokens=answer, tpot_s=tpot_s)


def judge_of(mix: Mix, count: int) -> Evaluator:
    side = max(mix.side, 28)
    workload = (
        f"synthetic,image_share={mix.share:g},image_size={side}x{side},text_tokens={TEXT_TOKENS},"
        f"output_tokens={mix.num_output_tokens}"
    )
    goal = Goal(ttft_s=TTFT_S, tpot_s=mix.tpot_s)
    fleet = read_fleet(f"{DEVICE} x {count}", MODEL)
    return Evaluator(fleet, goal, read_load(workload, rate=1.0, count=400, seed=0).requests, least=60, most=200)


def searched(mix: Mix) -> dict[str, Any]:
    """The best plan of either kind for one load."""
    judge = judge_of(mix, COUNT)
    plans = [one for one in candidates(judge.fleet) if one.is_monolithic or _is_apart(one)]
    found = enumerate_plans(judge, with_batching(plans), width=3)
    best = {
        kind: max(
            (one for one in found.ranking if one.candidate.is_monolithic == kind), key=lambda one: one.goodput
        )
        for kind in (True, False)
    }
    loads = best[True].bound.loads
    language_s = loads[Stage.PREFILL] + loads.get(Stage.DECODE, 0.0)
    return {
        **asdict(mix),
        "encode_s": loads.get(Stage.ENCODE, 0.0),
        "prefill_s": loads[Stage.PREFILL],
        "decode_s": loads.get(Stage.DECODE, 0.0),
        "encode_over_language": loads.get(Stage.ENCODE, 0.0) / language_s,
        "monolithic": told(best[True]),
        "disaggregated": told(best[False]),
        "gain": best[False].goodput / best[True].goodput - 1 if best[True].goodput else None,
        "simulations": judge.num_simulations,
    }


def bound_over(mix: Mix, count: int) -> dict[str, Any]:
    """The highest bound of a disaggregated plan over that of monolithic instances."""
    judge = judge_of(mix, count)
    best: dict[bool, tuple[float, str]] = {}
    for plan in candidates(judge.fleet):
        if plan.is_monolithic or _is_apart(plan):
            found = judge.bound(plan).rate, plan.line
            best[plan.is_monolithic] = max(found, best.get(plan.is_monolithic, found))
    return {**asdict(mix), "count": count, "plan": best[False][1], "over": best[False][0] / best[True][0] - 1}


def _is_apart(plan: Candidate) -> bool:
    """Whether no instance does all, alone or together with others on its device."""
    return not any(unit_does_all(one) for one in plan.topology.units)


def unit_does_all(unit: Any) -> bool:
    members = getattr(unit, "members", (unit,))
    return {stage for member in members for stage in member.role.stages} == set(Stage)


def told(plan: Evaluation) -> dict[str, Any]:
    return {"plan": str(plan.candidate), "goodput": plan.goodput, "bound": plan.bound.rate}


def draw(content: dict[str, Any], path: Path) -> None:
    """A panel for each limit: the gain over images, with the answers' lengths as rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = [(0, 0.0), (448, 1.0), (896, 0.5), (896, 1.0), (1792, 1.0)]
    labels = ["no image", "448²", "896²\nevery 2nd", "896²", "1792²"]
    figure = plt.figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1))
    panels = upper.subplots(1, len(TPOTS_S), sharey=True)
    for panel, tpot_s in zip(panels, TPOTS_S, strict=True):
        rows = {
            (one["num_output_tokens"], one["side"], one["share"]): one
            for one in content["loads"]
            if one["tpot_s"] == tpot_s
        }
        gains = [[rows[answer, *column]["gain"] for column in columns] for answer in ANSWERS]
        shown = panel.imshow(
            [[100 * (gain or 0) for gain in row] for row in gains], cmap="RdBu", vmin=-40, vmax=40, aspect="auto"
        )
        for y, answer in enumerate(ANSWERS):
            for x, column in enumerate(columns):
                one = rows[answer, *column]
                plan = one["disaggregated"]["plan"].removesuffix(" unlimited")
                text = "-" if one["gain"] is None else f"{one['gain']:+.0%}\n{plan}"
                panel.text(x, y, text, ha="center", va="center", fontsize=6.5)
        panel.set_xticks(range(len(columns)), labels, fontsize=7)
        panel.set_yticks(range(len(ANSWERS)), [str(answer) for answer in ANSWERS])
        panel.set_xlabel("image of a request, pixels")
        panel.set_title(f"TPOT at most {1e3 * tpot_s:g} ms", fontsize=9)
    panels[0].set_ylabel("tokens of an answer")
    upper.colorbar(shown, ax=panels, label="goodput over monolithic, %")
    lines = lower.subplots()
    for side, label in ((0, "no image"), (448, "448²"), (896, "896²"), (1792, "1792²")):
        over = [one["over"] for one in content["bounds"] if one["side"] == side]
        lines.plot(COUNTS, [100 * value for value in over], marker="o", label=label)
    lines.axhline(0, color="black", linewidth=0.8)
    lines.set_xticks(COUNTS)
    lines.set_xlabel(f"devices (answers of {LONG} tokens, TPOT at most {1e3 * TPOTS_S[1]:g} ms)")
    lines.set_ylabel("bound over monolithic, %")
    lines.legend(fontsize=8)
    figure.suptitle(f"Simulated: {content['model']} on {content['devices']}", fontsize=10)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argument_parser(__doc__, "planner-rule.json")
    parser.add_argument("--png", action="store_true", help="draw the plot beside the data")
    wanted = parser.parse_args()
    devices = f"{COUNT} x {DEVICE}"
    rows: list[dict[str, Any]] = []
    if wanted.output.exists():
        before = json.loads(wanted.output.read_text(encoding="utf-8"))
        rows = before["loads"] if (before["devices"], before["model"]) == (devices, MODEL) else []
    content: dict[str, Any] = {
        "command": typed("planner_rule"),
        "devices": devices,
        "times": "analytic, from the data sheet",
        "model": MODEL,
        "ttft_s": TTFT_S,
        "text_tokens": TEXT_TOKENS,
        "loads": rows,
    }
    todo = [mix for mix in mixes() if not any(asdict(mix).items() <= row.items() for row in rows)]
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(searched, todo):
            rows.append(row)
            write(wanted.output, content)
            print(json.dumps(row), flush=True)
    long = [Mix(side=side, share=float(side > 0), num_output_tokens=LONG, tpot_s=TPOTS_S[1]) for side in SIDES]
    content["bounds"] = [bound_over(mix, count) for mix in long for count in COUNTS]
    write(wanted.output, content)
    if wanted.png:
        draw(content, wanted.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
