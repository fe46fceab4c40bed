"""Mixed requests under random faults of E, P, D and the store's master, which are started again each time.

``--faults`` names them: ``kill`` (SIGKILL), ``hang`` (SIGSTOP, until the supervisor replaces the process),
``pause`` (SIGSTOP for up to half the time after which it would be replaced), ``cut`` (all TCP connections of a
process are destroyed; needs root), ``full`` (/dev/shm is full for some seconds), ``disk`` (nothing can be written
beside the logs for as long as a pause takes). The last two need a small /dev/shm and a file system for the logs::

    truncate -s 256M DISK && mkfs.ext4 -q DISK
    unshare --mount sh -c 'mount -t tmpfs -o size=512m none /dev/shm && mount -o loop DISK DIRECTORY &&
        EPD_SERVE_LOG_DIR=DIRECTORY python -m benchmarks.chaos ...'

With ``--streams`` all are long streams of patient clients, one instance of each role is left alone while another
is started again, and at least 99 % of the streams have to be complete.

The requests and their judge are those of ``epd-serve verify --suite faults``: every answer is compared with the
one that the same deployment gave before the first fault (greedy, float32). In the end no instance and no gateway
may hold anything. Run as ``python -m benchmarks.chaos [--requests 1000]`` from the repository's root; the exit
code is 1 where an answer was wrong, a request hung or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.common import RESULTS, ROOT, machine, typed, write
from benchmarks.deployed import held_in
from benchmarks.traffic import MEDIA, mixed_requests, report_of
from epd_serve.config import DEMO_MODEL, DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.process import ProcessState
from epd_serve.launch.processes.supervisor import Backoff
from epd_serve.verify.check import Failed
from epd_serve.verify.client import Client
from epd_serve.verify.traffic import BAD, Outcome, Request, Traffic

FAULTS = ("kill", "hang", "pause", "cut", "full", "disk")
LEASE_S = 3.0
DEADLINE_S = 60.0
HANG_TIMEOUT_S = 9.0
#: However slow the machine, a stream is not to be hit again and again.
ANSWERS_BETWEEN = 4
LEAST_COMPLETE = 0.99
_COUNTERS = re.compile(r"epd_serve_request_(retries|continuations)_total")
#: Seconds in which all has to be given back after the last fault.
_SETTLE_S = 4 * LEASE_S + HANG_TIMEOUT_S + 15


class Chaos(Traffic):
    """Traffic to a deployment whose processes are killed.

    Attributes:
        faults: names of faults, of which each time one is chosen.
        num_spared: processes of a kind that must be ready beside one that is killed.
        answers_between: answers that must come between two faults, so that a slow machine is not killed faster.
        kills: by name of the process, those that hang included.
        injected: number of faults by name.
        leaks: what was still held in the end.
    """

    def __init__(
        self,
        deployment: LocalDeployment,
        client: Client,
        *,
        seed: int = 0,
        interval_s: float = 0.0,
        faults: Sequence[str] = ("kill",),
    ) -> None:
        super().__init__(client, deadline_s=DEADLINE_S)
        self.deployment, self.rng = deployment, random.Random(seed)
        self.interval_s, self.faults = interval_s, faults
        self.num_spared = self.answers_between = 0
        self.kills: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.leaks: dict[str, Any] = {}

    async def run(self, requests: Sequence[Request], concurrency: int) -> None:
        """Ask all requests under faults; again, until at least one process of each kind was killed, if any is."""
        kinds = {kind_of(process.spec.name) for process in self.deployment.processes} - {"gateway"}
        if not {"kill", "hang"} & {*self.faults}:
            kinds = set()
        killing = asyncio.create_task(self.inject())
        try:
            while True:
                await self.ask_all(requests, concurrency)
                if killing.done():
                    killing.result()
                if kinds <= {kind_of(name) for name in self.kills}:
                    return
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)

    async def inject(self) -> None:
        """Inject faults into each kind of process in its turn, so that a short run strikes some of each too."""
        turn: list[str] = []
        struck: set[int] = set()  # a death may take the supervisor a while to notice
        enough = 0
        while True:
            await asyncio.sleep(self.interval_s * self.rng.uniform(0.5, 1.5))
            while len(self.results) < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            enough = len(self.results) + self.answers_between
            alive = defaultdict(list)
            for process in self.deployment.processes:
                is_up = process.state is ProcessState.READY and process.pid not in struck
                if is_up and process.spec.name != "gateway":
                    alive[kind_of(process.spec.name)].append(process)
            kinds = sorted(kind for kind, processes in alive.items() if len(processes) > self.num_spared)
            turn = [kind for kind in turn if kind in kinds] or self.rng.sample(kinds, len(kinds))
            if turn:
                victim = self.rng.choice(alive[turn.pop()])
                with suppress(ProcessLookupError):
                    struck |= await self._strike(victim.spec.name, victim.pid, self.rng.choice(self.faults))

    async def _strike(self, name: str, pid: int, fault: str) -> set[int]:
        """Inject a fault; return the process's pid if another one must replace it."""
        match fault:
            case "kill" | "hang":
                os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                self.kills[name] += 1
            case "pause":
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self.rng.uniform(0.1, HANG_TIMEOUT_S / 2))
                finally:
                    os.kill(pid, signal.SIGCONT)
            case "cut":
                ports = {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.raddr}
                ends = " or ".join(f"sport = :{port} or dport = :{port}" for port in sorted(ports))
                await _run("ss", "-KHt", f"( {ends} )")
            case "full":
                with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage("/dev/shm").free)
                    await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            case "disk":
                mount = shlex.quote(_mount_of_its_own(self.deployment.log_dir))
                seconds = self.rng.uniform(0.1, HANG_TIMEOUT_S / 2)
                # by another process: this one writes there too
                await _run("sh", "-c", f"fsfreeze -f {mount} && sleep {seconds:.2f}; fsfreeze -u {mount}")
        self.injected[fault] += 1
        return {pid} if fault in ("kill", "hang") else set()

    async def settle(self) -> None:
        """Wait until all have started again, and until nothing is held; what stays held is a leak."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            await self.deployment.wait_ready()
            restarts = sum(process.num_restarts for process in self.deployment.processes)
            if restarts >= self.kills.total() or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.2)
        self.leaks = await held_in(self.deployment, _SETTLE_S)
        if restarts < self.kills.total():
            self.leaks["processes"] = "one that was killed or stopped has not been started again"
        try:
            await self.client.wait_idle(_SETTLE_S)
        except Failed as failed:
            self.leaks["gateway"] = str(failed)

    def report(self) -> dict[str, Any]:
        results = [result for _, result in self.results]
        failed = [one.seconds for one in results if one.outcome is not Outcome.IDENTICAL]
        return {
            **report_of(self),
            "complete": round(1 - len(failed) / len(results), 4),
            "longest_failure_s": round(max(failed, default=0.0), 2),
            "longest_s": round(max(one.seconds for one in results), 2),
            "kills": dict(sorted(self.kills.items())),
            "faults": dict(sorted(self.injected.items())),
            "restarts": {one.spec.name: one.num_restarts for one in self.deployment.processes},
            "leaks": self.leaks,
        }


def _mount_of_its_own(directory: Path) -> str:
    if directory.stat().st_dev in (Path(tempfile.gettempdir()).stat().st_dev, ROOT.stat().st_dev):
        raise ValueError(f"{directory} is on this machine's own file system; mount another one there")
    return str(next(one for one in [directory, *directory.parents] if one.is_mount()))


async def _run(*command: str) -> None:
    if await (await asyncio.create_subprocess_exec(*command, stdout=DEVNULL)).wait():
        raise RuntimeError(f"failed: {shlex.join(command)}")


def kind_of(name: str) -> str:
    """e0 → e."""
    return name.rstrip("0123456789")


def deployment_config(arguments: argparse.Namespace, **gateway: Any) -> DeploymentConfig:
    return DeploymentConfig(
        topology=arguments.topology,
        model=arguments.model,
        gateway={"port": 0, "request_timeout_s": DEADLINE_S * 0.75, **gateway},
        feature_store=arguments.store,
        instances={
            "base_port": 0,
            "threads": 1,
            "peer_timeout_s": LEASE_S,
            # few blocks and small caches, so that requests wait for each other at every stage
            "kv_cache_bytes": 120 << 15,  # blocks of the demo model
            "max_num_batched_tokens": 64,
            "feature_cache_bytes": 1 << (19 if arguments.store == "embedded" else 24),  # its least
            "kv_transfer": {"transport": arguments.transport},
        },
    )


@asynccontextmanager
async def started(arguments: argparse.Namespace, config: DeploymentConfig) -> AsyncIterator[Chaos]:
    """The deployment, whose processes are started again at once, and its clients."""
    async with LocalDeployment(
        config,
        keep_logs=True,
        hang_timeout_s=HANG_TIMEOUT_S,
        ready_timeout_s=180,
        backoff=Backoff(first_s=0.2, limit_s=0.2),  # many deaths are wanted here
    ) as deployment:
        client = Client(deployment.gateway_url)
        try:
            await client.meet()
            options = {"seed": arguments.seed, "interval_s": arguments.interval, "faults": arguments.faults}
            yield Chaos(deployment, client, **options)
        finally:
            await client.close()


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    streams = arguments.streams
    requests = mixed_requests(arguments.requests, arguments.seed, patient=streams, media=arguments.media)
    async with started(arguments, deployment_config(arguments)) as chaos:
        if streams:
            chaos.num_spared, chaos.answers_between = 1, ANSWERS_BETWEEN
        await chaos.learn(requests, arguments.concurrency)
        began = time.monotonic()
        await chaos.run(requests, arguments.concurrency)
        seconds = time.monotonic() - began
        await chaos.settle()
        report = chaos.report()
        bad = any(report["outcomes"][outcome.value] for outcome in BAD)
        return {
            **heading("chaos", arguments, seconds, "topology", "store", "transport"),
            "interval_s": arguments.interval,
            "passed": not (bad or report["leaks"] or (streams and report["complete"] < LEAST_COMPLETE)),
            **report,
            **await counters(chaos.client),
            "logs": str(chaos.deployment.log_dir),
        }


async def counters(client: Client) -> dict[str, int]:
    """The gateway's counters of retries and continuations."""
    found = {}
    for name, value in (await client.metrics()).items():
        if counted := _COUNTERS.fullmatch(name):
            found[counted[1]] = int(value)
    return found


def heading(module: str, arguments: argparse.Namespace, seconds: float, *names: str) -> dict[str, Any]:
    """The head of a report: the command, the machine, the options of these names, the time."""
    options = {name: getattr(arguments, name) for name in (*names, "concurrency")}
    return {"command": typed(module), "machine": machine(), **options, "seconds": round(seconds, 1)}


def publish(report: dict[str, Any], output: Path) -> int:
    """Print and keep what was found; the exit code."""
    logs = report.pop("logs")
    write(output, report)
    Console().print_json(data=report)
    print(f"logs: {logs}")
    return 0 if report["passed"] else 1


def new_parser(description: str, *, num_requests: int) -> argparse.ArgumentParser:
    """The options of a run under faults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=num_requests)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--interval", type=float, default=8.0, help="mean seconds between two kills")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["kill"], help="repeat one for more of it")
    parser.add_argument("--topology", default="2E-2P-2D")
    parser.add_argument("--model", default=DEMO_MODEL, help="demo, or a transformers model directory")
    parser.add_argument("--store", choices=("embedded", "mooncake"), default="embedded")
    parser.add_argument("--transport", choices=("auto", "tcp", "mooncake"), default="auto")
    return parser


def main() -> int:
    parser = new_parser(__doc__ or "", num_requests=1000)
    parser.add_argument(
        "--media", nargs="+", choices=MEDIA, default=["picture"], help="those that the model takes"
    )
    parser.add_argument("--streams", action="store_true", help="long streams of patient clients alone")
    parser.add_argument("--output", type=Path, default=RESULTS / "chaos.json")
    arguments = parser.parse_args()
    return publish(asyncio.run(run(arguments)), arguments.output)


if __name__ == "__main__":
    sys.exit(main())
