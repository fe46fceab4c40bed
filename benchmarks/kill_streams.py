"""Streams under random SIGKILLs of every role: what a client sees of an instance that dies in the middle.

Each stream is greedy and is compared with what the same deployment gave before the first fault. One instance of
each role is left alone while another is started again: where none is, a gateway can only say so. The exit code is
1 unless at least 99 % of the streams are complete, all of those identical, none ended in order and short, each
failure said within the deadline, and nothing held in the end. With ``--hangs`` some instances are stopped (by
SIGSTOP) instead. Run as ``python -m benchmarks.kill_streams`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos import (
    DEADLINE_S,
    Chaos,
    Outcome,
    deployment_config,
    heading,
    make_streams,
    new_parser,
    publish,
    started,
)
from benchmarks.common import RESULTS

RESULT = RESULTS / "kill-streams-cpu.json"
LEAST_COMPLETE = 0.99
#: An instance of the built-in model is there again after a few seconds, however busy the machine.
WAIT_S = 30.0
#: However slow the machine, a stream is not to be hit again and again.
ANSWERS_BETWEEN = 4
_COUNTERS = re.compile(
    r"^epd_serve_(?:request_(retries|continuations)_total|migrations_total\{outcome=\"(\w+)\"\}) (\S+)$",
    re.MULTILINE,
)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    streams = make_streams(arguments.requests, arguments.seed)
    log_dir = Path(tempfile.mkdtemp(prefix="epd-serve-kills-"))
    config = deployment_config(arguments, failover={"wait_s": WAIT_S})
    async with started(arguments, config, log_dir) as chaos:
        chaos.num_spared, chaos.answers_between = 1, ANSWERS_BETWEEN
        await chaos.learn(streams, arguments.concurrency)
        began = time.monotonic()
        await chaos.run(streams, arguments.concurrency)
        seconds = time.monotonic() - began
        await chaos.settle()
        return {
            **heading("kill_streams", arguments, seconds, "topology"),
            "interval_s": arguments.interval,
            "deadline_s": DEADLINE_S,
            **await _judged(chaos),
            "logs": str(log_dir),
        }


async def _judged(chaos: Chaos) -> dict[str, Any]:
    report, results = chaos.report(), [result for _, result in chaos.results]
    complete = sum(result.outcome is Outcome.IDENTICAL for result in results) / len(results)
    failed = [result.seconds for result in results if result.outcome is not Outcome.IDENTICAL]
    counted = await counters(chaos.client)
    wrong = report["outcomes"][Outcome.WRONG.value] + report["outcomes"][Outcome.HANG.value]
    return {
        "passed": complete >= LEAST_COMPLETE and not wrong and not report["leaks"],
        "complete": round(complete, 4),
        "longest_failure_s": round(max(failed, default=0.0), 2),
        "longest_s": round(max(result.seconds for result in results), 2),
        **counted,
        **report,
    }


async def counters(client: httpx.AsyncClient) -> dict[str, int]:
    """The gateway's counters of retries, continuations and moves."""
    exposition = (await client.get("/metrics")).text
    return {name or outcome: int(float(value)) for name, outcome, value in _COUNTERS.findall(exposition)}


def main() -> int:
    parser = new_parser(__doc__ or "", num_requests=500)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    return publish(asyncio.run(run(arguments)), arguments.output)


if __name__ == "__main__":
    sys.exit(main())
