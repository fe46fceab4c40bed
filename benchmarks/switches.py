"""Streams under forced role switches: no client may see an error, a token twice or a token missing.

Each stream is greedy and is compared with what the same deployment gave before the first switch. Instances are
switched one after the other, from any role to any other, while at least one of each stage goes on serving. The
exit code is 1 unless every stream is complete and identical and nothing is held in the end. Afterwards each pair
of roles is switched on the idle deployment, for the time that a switch takes. Run as
``python -m benchmarks.switches`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos import (
    DEADLINE_S,
    Chaos,
    counters,
    deployment_config,
    heading,
    new_parser,
    publish,
    started,
)
from benchmarks.common import RESULTS
from benchmarks.gateway.programs import free_ports
from benchmarks.traffic import mixed_requests
from epd_serve.verify.traffic import Outcome

RESULT = RESULTS / "switches-cpu.json"
#: Roles that an instance takes in turn under load, and those whose pairs are timed.
UNDER_LOAD = ("P", "D", "E", "PD", "EP", "EPD", "ED")
TIMED = ("P", "D", "E")


class Switcher:
    """Orders switches at a gateway's admin plane.

    Attributes:
        done: (instance, from, to, seconds, seconds of those to drain) of each.
        refused: orders that the gateway could not let be carried out just then, by status.
    """

    def __init__(self, admin_url: str, roles: dict[str, str]) -> None:
        self._client = httpx.AsyncClient(base_url=admin_url, timeout=None, trust_env=False)
        self.roles = roles
        self.done: list[dict[str, Any]] = []
        self.refused: Counter[int] = Counter()

    async def order(self, name: str, role: str) -> bool:
        body = {"role": role, "deadline_s": 60, "patience_s": 0.2}
        answer = await self._client.post(f"/instances/{name}/role", json=body)
        if answer.status_code != 200:
            self.refused[answer.status_code] += 1
            return False
        self.done.append(answer.json())
        self.roles[name] = role
        return True

    def keeps_all(self, name: str, role: str) -> bool:
        """Whether each stage has an instance while ``name`` changes, and after it."""
        others = [one for other, one in self.roles.items() if other != name]
        return all(any(stage in one for one in others) for stage in "PD")

    async def close(self) -> None:
        await self._client.aclose()


async def switch_under_load(switcher: Switcher, chaos: Chaos, count: int, loads: asyncio.Task[None]) -> None:
    """``count`` switches while the streams run, each after some more answers, however slow the machine."""
    enough = 0
    while len(switcher.done) < count and not loads.done():
        while len(chaos.results) < enough and not loads.done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        name = chaos.rng.choice(sorted(switcher.roles))
        role = chaos.rng.choice([role for role in UNDER_LOAD if role != switcher.roles[name]])
        if switcher.keeps_all(name, role) and await switcher.order(name, role):
            enough = len(chaos.results) + chaos.answers_between


async def time_pairs(switcher: Switcher) -> dict[str, dict[str, float]]:
    """Seconds of one idle instance, beside the others, from each role to each other."""
    name = next(name for name, role in switcher.roles.items() if switcher.keeps_all(name, role))
    seconds: dict[str, list[float]] = {}
    for _ in range(5):
        for role in (*TIMED, *reversed(TIMED)):
            if role != switcher.roles[name]:
                assert await switcher.order(name, role), f"{name} → {role} was refused"
                last = switcher.done.pop()
                seconds.setdefault(f"{last['from']} → {last['to']}", []).append(last["seconds"])
    return {
        pair: {
            "median_s": round(statistics.median(values), 4),
            "longest_s": round(max(values), 4),
            "runs": len(values),
        }
        for pair, values in sorted(seconds.items())
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    streams = mixed_requests(arguments.requests, arguments.seed, patient=True)
    port = free_ports(1)[0]
    config = deployment_config(arguments, admin={"port": port})
    async with started(arguments, config) as chaos:
        chaos.answers_between = max(1, arguments.requests // (arguments.switches + 2))
        roles = {name: str(handle.role) for name, handle in chaos.deployment.instances.items()}
        switcher = Switcher(f"http://127.0.0.1:{port}", roles)
        await chaos.learn(streams, arguments.concurrency)
        began = time.monotonic()
        loads = asyncio.create_task(chaos.ask_all(streams, arguments.concurrency))
        await switch_under_load(switcher, chaos, arguments.switches, loads)
        await loads
        seconds = time.monotonic() - began
        await chaos.settle()
        under_load = list(switcher.done)
        pairs = await time_pairs(switcher)
        await switcher.close()
        report = chaos.report()
        complete = report["outcomes"][Outcome.IDENTICAL.value]
        return {
            **heading("switches", arguments, seconds, "topology", "model"),
            "deadline_s": DEADLINE_S,
            "passed": complete == len(chaos.results)
            and not report["leaks"]
            and len(under_load) >= arguments.switches,
            "switches_under_load": under_load,
            "refused": dict(switcher.refused),
            "idle_switches": pairs,
            **await counters(chaos.client),
            **{key: report[key] for key in ("requests", "distinct", "outcomes", "clear_errors", "leaks", "wrong")},
            "logs": str(chaos.deployment.log_dir),
        }


def main() -> int:
    parser = new_parser(__doc__ or "", num_requests=500)
    parser.add_argument("--switches", type=int, default=20, help="under load")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    return publish(asyncio.run(run(arguments)), arguments.output)


if __name__ == "__main__":
    sys.exit(main())
