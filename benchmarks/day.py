"""A day of mixed load in compressed time on emulated devices, while instances are killed and stopped at random.

    python -m benchmarks.day [--seconds 900] [--peak 4] [--topology 8E-8P-16D]

Texts, pictures, several pictures and videos arrive at a rate that follows the hours: a quiet night, a rise in the
morning, peaks at noon and in the evening. Devices compute nothing but check digests, in times of the data sheet
that are :data:`SLOWNESS` times as long, so that this machine carries the tokens; each answer is compared with the
one that the deployment gave before. Faults (--faults, as in benchmarks.chaos) begin after a twelfth of the
day. Memory and descriptors are then compared with the end's: of the gateway (the lowest of several samples,
because it seldom collects garbage) and of instances that were never restarted. The exit code is 1 where an answer
was wrong or late, something was held in the end, descriptors increased or that memory grew too much.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import FAULTS, LEASE_S, counters, publish, started
from benchmarks.common import argument_parser, host_busy, machine, slowed, typed
from benchmarks.deployed import descriptors
from benchmarks.soak import sample
from benchmarks.traffic import Timed, ask_at_times, mixed_requests
from epd_serve.config import DeploymentConfig
from epd_serve.cost.roofline import emulated_profile
from epd_serve.topology import parse_topology
from epd_serve.verify.items import asked, clip
from epd_serve.verify.traffic import Outcome, Request, Result

MODEL, DEVICE, SLOWNESS = "qwen2.5-vl-7b", "ascend-910b3", 4.0
#: Limits of both, in seconds: those of benchmarks.plan_emulated for this device, times SLOWNESS.
TTFT_S, TPOT_S = 0.5 * SLOWNESS, 0.05 * SLOWNESS
#: Share of the peak's rate at each full hour, and the parts of the day by their first hours.
HOURS = (20, 14, 10, 8, 8, 12, 22, 40, 60, 72, 82, 95, 100, 92, 78, 70, 68, 72, 82, 94, 98, 86, 58, 34, 20)
PARTS = {"night": 0, "morning": 6, "midday": 11, "afternoon": 14, "evening": 18, "late evening": 22}
COLORS = ("red", "green", "blue", "yellow", "white", "black", "purple", "orange")
#: An instance grows from 36 to about 41 MiB in its first thousand requests, then hardly any more.
MOST_GROWTH = 1.15


def day_requests(count: int, seed: int) -> list[Request]:
    """The requests of the other benchmarks; one in eight asks about a video instead."""
    found, rng = mixed_requests(count, seed, plain=True), random.Random(seed)
    for number in range(0, count, 8):
        video = clip(rng.choices(COLORS, k=3), num_frames=rng.choice((4, 8)))
        found[number] = replace(found[number], key=f"video {number}", content=asked(video, text="What happens?"))
    return found


def arrivals(seconds: float, peak: float, seed: int) -> Iterator[float]:
    """Times in hours of a Poisson process whose rate follows HOURS; a day takes ``seconds``."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(peak)) < seconds:
        hour, part = divmod(24 * at_s / seconds, 1)
        before, after = HOURS[int(hour)], HOURS[int(hour) + 1]
        if 100 * rng.random() < before + part * (after - before):
            yield 24 * at_s / seconds


def kept_limits(request: Request, result: Result) -> bool:
    ttft_s, limit_s = result.ttft_s or 0.0, TPOT_S * max(request.fields["max_tokens"] - 1, 1)
    return result.outcome is Outcome.IDENTICAL and ttft_s <= TTFT_S and result.seconds - ttft_s <= limit_s


def by_part(answers: Sequence[Timed], seconds: float) -> dict[str, Any]:
    """Figures of each part of the day; TTFT and attainment are those of streams."""
    found = {}
    for (name, begin), (_, end) in pairwise([*PARTS.items(), ("", 24)]):
        within = [(request, result) for at_s, request, result in answers if begin <= 24 * at_s / seconds < end]
        patient = [one for one in within if one[1].outcome is not Outcome.CANCELLED]
        streams = [one for one in patient if one[0].fields["stream"]]
        ttft_s = [one.ttft_s for _, one in streams if one.ttft_s is not None]
        if len(ttft_s) > 1:
            found[name] = {
                "requests_per_s": round(len(within) / ((end - begin) * seconds / 24), 2),
                "complete": round(sum(one.outcome is Outcome.IDENTICAL for _, one in patient) / len(patient), 4),
                "ttft_p50_s": round(statistics.median(ttft_s), 3),
                "ttft_p99_s": round(statistics.quantiles(ttft_s, n=100, method="inclusive")[98], 3),
                "attained": round(sum(kept_limits(*one) for one in streams) / len(streams), 4),
            }
    return found


def memory(begun: dict[str, Any], last: dict[str, Any], restarted: set[str]) -> dict[str, Any]:
    """PSS in MiB after a twelfth of the day and at its end."""
    found, instances = {}, last.keys() - {"gateway"}
    of = {"gateway": {"gateway"}, "instances": instances, "instances never restarted": instances - restarted}
    for name, members in of.items():
        mib = [round(sum(each[one]["mib"] for one in members), 1) for each in (begun, last)]
        growth = round(mib[1] / mib[0], 4) if members else 1.0
        found[name] = {"processes": len(members), "after_a_twelfth": mib[0], "end": mib[1], "growth": growth}
    return found


def config_of(topology: str, directory: Path) -> DeploymentConfig:
    profile = directory / f"{DEVICE}.json"
    profile.write_bytes(slowed(emulated_profile(MODEL, DEVICE), SLOWNESS).to_json())
    return DeploymentConfig(
        topology=topology,
        devices=[f"emulated:{profile} x {parse_topology(topology).num_devices}"],
        model={"shape_of": MODEL},
        gateway={"port": 0, "request_timeout_s": 45},
        instances={"base_port": 0, "peer_timeout_s": LEASE_S},
    )


async def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    seconds, requests = float(arguments.seconds), day_requests(arguments.distinct, arguments.seed)
    arrivals_s = [hour * seconds / 24 for hour in arrivals(seconds, arguments.peak, arguments.seed)]
    async with started(arguments, config_of(arguments.topology, directory)) as chaos:
        await chaos.learn(requests, 16)
        living = asyncio.create_task(ask_at_times(chaos, requests, arrivals_s))
        await asyncio.sleep(seconds / 12)
        begun, opened, busy = sample(chaos.deployment), descriptors(chaos.deployment), list[float]()
        gateway, pss = psutil.Process(chaos.deployment.process("gateway").pid), [begun["gateway"]["mib"]]
        killing = asyncio.create_task(chaos.inject())
        host_busy()
        while not (await asyncio.wait([living], timeout=seconds / 48))[0]:
            busy.append(host_busy())
            pss.append(round(gateway.memory_full_info().pss / 2**20, 1))
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await chaos.settle()
        last, still_open = sample(chaos.deployment), descriptors(chaos.deployment)
        report = {**chaos.report(), **await counters(chaos.client)}
    restarted = {name for name, count in report["restarts"].items() if count}
    quarter = max(len(pss) // 4, 1)
    begun["gateway"]["mib"], last["gateway"]["mib"] = min(pss[:quarter]), min(pss[-quarter:])
    mib = memory(begun, last, restarted)
    unharmed = still_open.keys() - restarted
    more = {name: [opened[name], still_open[name]] for name in unharmed if still_open[name] > opened[name]}
    grew = [name for name, one in mib.items() if name != "instances" and one["growth"] > MOST_GROWTH]
    return {
        "command": typed("day"),
        "machine": machine(),
        "topology": arguments.topology,
        "devices": f"emulated {DEVICE}, {SLOWNESS:g} times as slow, {MODEL}",
        "seconds": seconds,
        "peak_requests_per_s": arguments.peak,
        "interval_s": arguments.interval,
        "passed": not (report["wrong"] or report["leaks"] or more or grew),
        **report,
        "num_restarts": sum(report["restarts"].values()),
        "memory_mib": mib,
        "descriptors_that_increased": more,
        "slo": {"ttft_s": TTFT_S, "tpot_s": TPOT_S},
        "parts_of_the_day": by_part(living.result(), seconds),
        "host_busy": {"mean": round(statistics.fmean(busy), 3), "most": round(max(busy), 3)},
        "logs": str(chaos.deployment.log_dir),
    }


def main() -> int:
    parser = argument_parser(__doc__, "day-emulated.json")
    parser.add_argument("--topology", default="8E-8P-16D")
    parser.add_argument("--seconds", type=float, default=900.0, help="of the whole day")
    parser.add_argument("--peak", type=float, default=4.0, help="requests per second at noon")
    parser.add_argument("--interval", type=float, default=20.0, help="mean seconds between two faults")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["kill", "kill", "hang"])
    parser.add_argument("--distinct", type=int, default=240, help="requests, which are repeated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epd-serve-day-") as directory:
        return publish(asyncio.run(run(arguments, Path(directory))), arguments.output)


if __name__ == "__main__":
    sys.exit(main())
