"""The pods of a deployment file under load: Deployments are rolled out, then the only P and D deleted by force.

The manifests of ``epd-serve render kubernetes`` run in namespaces of this machine: commands of containers with
their environment, user, capabilities, read-only root and volumes; probes; Services and their endpoints, in
nftables; NetworkPolicies; SIGTERM and grace; restarts; rolling updates by maxSurge and maxUnavailable. Not
there: seccomp, limits of CPU and memory, the scheduler, disruption budgets. Each answer is compared with the one
that was given before the first fault. Then a pod of somebody else tries every port on which the deployment's
pods listen.

    python -m benchmarks.podlab [deploy/cpu-e-p-d.yaml] [--root gateway=DIRECTORY --root instances=DIRECTORY]

It needs root, nftables and overlayfs. ``--root`` runs a container in an image's files instead of this machine's.
The exit code is 1 where a request failed, a pod outlived its grace, or the stranger reached more than the API.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from epd_serve.launch.remote.values import Values

from benchmarks.common import ROOT, argument_parser, machine, typed, write
from benchmarks.podlab.cluster import Cluster, cluster
from benchmarks.podlab.network import enter, is_possible
from benchmarks.podlab.pod import Image
from benchmarks.traffic import mixed_requests
from epd_serve.launch.remote.kubernetes import manifests
from epd_serve.verify.client import Client
from epd_serve.verify.traffic import Outcome, Request, Traffic

SECRETS = {"admin": "admin-key-of-the-cluster", "cluster": "cluster-key-of-the-cluster"}
#: As long as the rendered file lets requests wait for a pod, and then some.
DEADLINE_S = 400.0
#: Requests are asked for so long before a change and after it.
_AFTER_S = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def images(roots: Mapping[str, Path]) -> dict[str, Image]:
    """By container; the files of this machine and the packages of this interpreter where no root is given."""
    own = {"PATH": f"{Path(sys.executable).parent}:{_PATH}", "PYTHONPATH": str(ROOT)}
    built = {"PATH": f"/opt/epd-serve/bin:{_PATH}", "PYTHONUNBUFFERED": "1"}
    return {
        name: Image(root=roots[name], environment=built)
        if name in roots
        else Image(root=Path("/"), environment=own, opened=(Path(sys.executable).resolve(), ROOT))
        for name in ("gateway", "instances", "master")
    }


async def under_load(
    traffic: Traffic, requests: Sequence[Request], concurrency: int, change: Awaitable[float]
) -> dict[str, Any]:
    """Make a change while requests are asked; what became of them."""
    traffic.results.clear()
    over = asyncio.Event()
    asking = asyncio.create_task(traffic.ask_until(requests, concurrency, over))
    await asyncio.sleep(_AFTER_S)
    seconds = await change
    await asyncio.sleep(_AFTER_S)
    over.set()
    await asking
    failed = [
        f"{result.outcome}: {result.detail}"
        for _, result in traffic.results
        if result.outcome not in (Outcome.IDENTICAL, Outcome.CANCELLED)
    ]
    return {
        "seconds": round(seconds, 1),
        "requests": len(traffic.results),
        "cancelled": traffic.outcomes()[Outcome.CANCELLED],
        "failed": len(failed),
        "failures": failed[:8],
        "slowest_s": round(max(result.seconds for _, result in traffic.results), 1),
    }


async def run(
    file: Path,
    directory: Path,
    roots: Mapping[str, Path],
    num_requests: int,
    concurrency: int,
    *,
    changes: str,
) -> dict[str, Any]:
    """First answers, the changes whose names have ``changes`` in them, and the ports that are reached."""
    docs = manifests(file, Values(gateways=2))
    async with cluster(docs, images(roots), directory, SECRETS) as running:
        enter(running.stranger.pid)  # the clients are strangers, too
        started_s = await running.ready()
        client = Client(f"http://{running.address('epd')}", slowness=4.0)
        await client.meet()
        requests = mixed_requests(num_requests, seed=0)
        traffic = Traffic(client, deadline_s=DEADLINE_S)
        await traffic.learn(requests, concurrency)
        phases = {}
        for name, change in _changes(running):
            if changes not in name:
                continue
            phases[name] = await under_load(traffic, requests, concurrency, change())
            print(name, phases[name], flush=True)
        own = next(pod for pod in running.pods.values() if pod.owner.endswith("-gateway"))
        ports = {
            "listening": running.listening(),
            "reached by a pod of the deployment": running.reached(own.sandbox),
            "reached by a stranger": running.reached(running.stranger),
        }
        late = running.ended_late()
        restarts = sum(pod.num_restarts for pod in running.pods.values())
        await client.close()
    listening, inside, outside = ports.values()
    is_closed = inside == listening and outside == {name: [8000] * name.endswith("-gateway") for name in listening}
    return {
        "file": file.name,
        "started_s": round(started_s, 1),
        "phases": phases,
        "ports": ports,
        "ended_after_their_grace": late,
        "restarts": restarts,
        "passed": is_closed and not late and not any(phase["failed"] for phase in phases.values()),
    }


def _changes(running: Cluster) -> list[tuple[str, Callable[[], Awaitable[float]]]]:
    """Every Deployment is rolled out; then each that has one pod of instances loses it."""
    found: list[tuple[str, Callable[[], Awaitable[float]]]] = []
    for name in running.deployments:
        found.append((f"rollout of {name}", partial(running.rollout, name)))
    for name in running.deployments:
        if sum(pod.owner == name for pod in running.pods.values()) == 1:
            found.append((f"forced deletion of the only pod of {name}", partial(running.force_delete, name)))
    return found


def main() -> int:
    parser = argument_parser(__doc__, "podlab.json")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "deploy" / "cpu-e-p-d.yaml")
    parser.add_argument("--requests", type=int, default=24, help="distinct ones, which are asked in turn")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument(
        "--changes", default="", help="only those whose names have this, as in 'forced' or 'epd-p'"
    )
    parser.add_argument("--root", action="append", default=[], metavar="CONTAINER=DIRECTORY")
    arguments = parser.parse_args()
    if not is_possible():
        raise SystemExit(
            "pods are made of namespaces, overlayfs and nftables, which take root and a kernel with them"
        )
    roots = {name: Path(root) for name, root in (one.split("=", 1) for one in arguments.root)}
    with tempfile.TemporaryDirectory(prefix="epd-serve-podlab-") as directory:
        began = time.monotonic()
        report = asyncio.run(
            run(
                arguments.file,
                Path(directory),
                roots,
                arguments.requests,
                arguments.concurrency,
                changes=arguments.changes,
            )
        )
    head = {"command": typed("podlab"), "machine": machine(), "total_s": round(time.monotonic() - began, 1)}
    print(write(arguments.output, head | report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
