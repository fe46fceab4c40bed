"""``epd-serve apply`` through the CPU topologies of ``deploy/`` in a ring, under load: no request may notice.

One deployment is started from the first file and becomes each of the others in turn, and the first again, while
clients ask greedy requests (texts, pictures, streams and answers in one piece). Each answer is compared with what
the first topology gave before the first change. The exit code is 1 unless all of them are complete and identical
and nothing is held in the end, and no instance was stopped before it was empty. Run as
``python -m benchmarks.apply_ring`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.chaos import Chaos, counters, heading, publish
from benchmarks.common import ROOT, argument_parser
from benchmarks.traffic import mixed_requests
from epd_serve.config import load_config
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.verify.client import Client
from epd_serve.verify.traffic import Outcome, Request

#: Names of files in deploy/: EPD, EP-D, E-P-D, (E-P)-D, (E-D)-P, (E-PD), ED-P, 2E-P-D.
RING = ("cpu-epd", "cpu-ep-d", "cpu-e-p-d", "cpu-e_p-d", "cpu-e_d-p", "cpu-e_pd", "cpu-ed-p", "cpu-2e-p-d")
#: On any ports, as others may run on this machine.
_PORTS = "\ngateway: {port: 0}\ninstances: {base_port: 0}\n"
#: What an instance says that is ended before it is empty.
_TOO_EARLY = "some requests did not finish"


def make_load(count: int, seed: int) -> list[Request]:
    """Half of them streams long enough to meet a step in their middle; nobody leaves early."""
    whole = [replace(one, patience_s=None) for one in mixed_requests(count - count // 2, seed)]
    mixed = [*whole, *mixed_requests(count // 2, seed, patient=True)]
    random.Random(seed).shuffle(mixed)
    return mixed


async def by_command(deployment: LocalDeployment, file: Path) -> list[str]:
    """Run ``epd-serve apply``; return its output."""
    port = deployment.gateway_url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_serve.cli", "apply", str(file), "--deployment", port),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"epd-serve apply {file.name}: {output.decode()}")
    return output.decode().splitlines()[:-1]


async def by_call(deployment: LocalDeployment, file: Path) -> list[str]:
    """The same in this process."""
    said: list[str] = []
    await deployment.apply(load_config(file), said.append)
    return said


async def go_round(arguments: argparse.Namespace, chaos: Chaos, files: list[Path]) -> list[dict[str, Any]]:
    """Each change, with some answers in between, however slow the machine."""
    applies = []
    for _ in range(arguments.laps):
        for file in [*files[1:], files[0]]:
            before = len(chaos.results)
            while len(chaos.results) < before + arguments.answers:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            began = time.monotonic()
            apply = by_call if arguments.direct else by_command
            said = await apply(chaos.deployment, file)
            applies.append(
                {
                    "file": f"deploy/{file.name}",
                    "topology": str(load_config(file).topology),
                    "seconds": round(time.monotonic() - began, 2),
                    "steps": [line.partition(": ")[2] for line in said if line.startswith("step ")],
                    "instances": {name: str(one.role) for name, one in chaos.deployment.instances.items()},
                }
            )
    return applies


def files_of(ring: list[str], folder: Path) -> list[Path]:
    """Copies of the deployment files, on free ports."""
    files = []
    for name in ring:
        file = folder / f"{name}.yaml"
        file.write_text((ROOT / "deploy" / file.name).read_text() + _PORTS)
        files.append(file)
    return files


def ended_too_early(log_dir: Path) -> list[str]:
    return [log.name for log in log_dir.glob("*.log") if _TOO_EARLY in log.read_text(errors="replace")]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    requests = make_load(arguments.requests, arguments.seed)
    files = files_of(arguments.ring, Path(tempfile.mkdtemp(prefix="epd-serve-ring-")))
    async with LocalDeployment(load_config(files[0]), keep_logs=True, ready_timeout_s=180) as deployment:
        log_dir = deployment.log_dir
        client = Client(deployment.gateway_url)
        await client.meet()
        chaos = Chaos(deployment, client, seed=arguments.seed)
        await chaos.learn(requests, arguments.concurrency)
        began, done = time.monotonic(), asyncio.Event()
        asking = asyncio.create_task(chaos.ask_until(requests, arguments.concurrency, done))
        try:
            applies = await go_round(arguments, chaos, files)
        finally:
            done.set()
            await asking
        seconds = time.monotonic() - began
        await chaos.settle()
        report, counted = chaos.report(), await counters(client)
        await client.close()
    too_early = ended_too_early(log_dir)
    kinds = Counter(step.split()[0] for one in applies for step in one["steps"])
    complete = report["outcomes"][Outcome.IDENTICAL.value]
    return {
        **heading("apply_ring", arguments, seconds),
        "passed": complete == len(chaos.results) and not report["leaks"] and not too_early,
        "applies": applies,
        "steps": dict(sorted(kinds.items())),
        "stopped_too_early": too_early,
        **counted,
        **{
            key: report[key]
            for key in ("requests", "distinct", "outcomes", "clear_errors", "restarts", "leaks", "wrong")
        },
        "logs": str(log_dir),
    }


def main() -> int:
    parser = argument_parser(__doc__, "apply-ring-cpu.json")
    parser.add_argument("--requests", type=int, default=120, help="different ones, asked again and again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--laps", type=int, default=2)
    parser.add_argument("--answers", type=int, default=12, help="at least between two changes")
    parser.add_argument("--ring", nargs="+", default=list(RING), help="names of files in deploy/")
    parser.add_argument("--direct", action="store_true", help="in this process, without the command")
    arguments = parser.parse_args()
    return publish(asyncio.run(run(arguments)), arguments.output)


if __name__ == "__main__":
    sys.exit(main())
