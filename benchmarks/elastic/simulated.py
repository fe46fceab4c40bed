"""EPD's table 6 in the simulator: 8 instances, and answers that get ten times longer behind the first tenth.

The paper gives no stage times. Those of :data:`PAPER` are chosen so that its two layouts, each without a switch,
come near its two rows; the controller knows neither the layouts nor that anything will change.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.elastic.switching import RoleSpan, Switching
from epd_serve.autoscale.controller import Controller
from epd_serve.autoscale.pressure import Limits
from epd_serve.config.sections import ElasticConfig
from epd_serve.cost.profile import EncodeLine, Line, Profile
from epd_serve.sim.simulator import Simulation, simulate
from epd_serve.sim.spec import Batching, build
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology

PIXELS = (4032, 3024)
PAPER = Profile(
    kind="measured",
    device="a800",
    model="as in EPD's table 6",
    step=(Line(base_s=0.012, token_s=0.0003, sequence_s=0.0021),),
    encode=(EncodeLine(pixel_s=0.5 / (PIXELS[0] * PIXELS[1])),),
    tokens_per_image=640,
    kv_token_bytes=57344,
    feature_token_bytes=7168,
    num_layers=28,
    link_bytes_per_s=2e11,
)
LIMITS = Limits(ttft_s=2.6, tpot_s=0.04)
START, PAPERS_END = "5E-P-2D", "2E-P-5D"
#: Made for long answers to text, as in :func:`opposite`.
DECODERS = "E-P-6D"


def requests(count: int, rate: float, *, short: int = 50, factor: int = 10, seed: int = 0) -> list[SimRequest]:
    """One 4K image each; behind the first tenth, answers are ``factor`` times longer."""
    draw, at_s, made = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += draw.expovariate(rate)
        made.append(
            SimRequest(
                at_s=at_s,
                images=((str(number), PIXELS[0] * PIXELS[1]),),
                num_text_tokens=22,
                num_output_tokens=short if number < count // 10 else factor * short,
            )
        )
    return made


def opposite(count: int, rate: float, *, seed: int = 0) -> list[SimRequest]:
    """The first three tenths want long answers and have no image; behind them come images with short answers."""
    every = requests(count, rate, short=500, factor=1, seed=seed)
    return [
        replace(one, images=()) if number < 3 * count // 10 else replace(one, num_output_tokens=50)
        for number, one in enumerate(every)
    ]


def run(topology: str, every: Sequence[SimRequest], switching: Switching | None) -> Simulation:
    parsed = parse_topology(topology)
    deployment = build(
        parsed,
        [f"cuda:{number}" for number in range(parsed.num_devices)],
        lambda *_: PAPER,
        batching=Batching(max_num_seqs=128),
        num_blocks=1 << 14,
    )
    return simulate(deployment, every, on_report=switching.tick if switching is not None else None)


def figures(outcome: Simulation) -> dict[str, float]:
    """Means over all requests, in seconds; raises RuntimeError where one has failed."""
    if failed := [job.failure for job in outcome.jobs if job.failure]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    jobs = [
        (job.sent_s, job.first_token_s or 0.0, job.last_token_s or 0.0, max(job.num_output - 1, 1))
        for job in outcome.jobs
    ]
    return {
        "latency_s": fmean(last - sent for sent, _, last, _ in jobs),
        "ttft_s": fmean(first - sent for sent, first, _, _ in jobs),
        "tpot_s": fmean((last - first) / num for _, first, last, num in jobs),
        "seconds": outcome.seconds,
    }


def table(start: str, end: str, loads: Mapping[int, Sequence[SimRequest]]) -> list[dict[str, Any]]:
    """Return a row for each seed's requests; ``end`` is the layout that would be right behind the change."""
    rows: list[dict[str, Any]] = []
    for seed, every in loads.items():
        switching = Switching(
            Controller(ElasticConfig(cooldown_s=3.0), LIMITS),
            interval_s=0.3,
            num_blocks=1 << 14,
        )
        outcome = run(start, every, switching)
        row = {
            "seed": seed,
            "with": figures(outcome),
            "without": figures(run(start, every, None)),
            f"{end}_from_the_start": figures(run(end, every, None)),
            "end": str_of(switching.spans),
            "switches": [
                {"at_s": one.at_s, "reason": one.reason} for one in switching.decisions if one.order is not None
            ],
        }
        row["ratio"] = {
            name: row["without"][name] / row["with"][name] for name in ("latency_s", "ttft_s", "tpot_s")
        }
        rows.append(row)
    return rows


def str_of(spans: Sequence[RoleSpan]) -> str:
    """The last layout, as in 2E1P5D."""
    last = {span.instance: str(span.role) for span in spans}
    roles = list(last.values())
    return "".join(f"{roles.count(role)}{role}" for role in ("E", "P", "D") if role in roles)
