"""(E-D), ED and (E-PD): what encodes on the device of decodes cost their time per token.

E and D as two instances, with and without shares and the guard; as one instance; E beside an instance of P and D.

Run as ``python -m benchmarks.colocation`` from the root of the repository; writes results/colocation-cpu.json.
Each deployment serves text requests alone and beside a stream of encodes, in turns: what else happens on the
machine meets both alike.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import CHAT_PATH, RESULTS, argument_parser, greedy_chat, machine, noise, write
from benchmarks.deployed import closed_loop, deployed
from benchmarks.models import make_model
from epd_serve.instance.http import Peers
from epd_serve.launch import LocalDeployment
from epd_serve.protocol import wire

RESULT = RESULTS / "colocation-cpu.json"
DEFAULT_TOPOLOGY = "(E-D)-P"
SIDE = 448
CONCURRENCY, TOKENS, REQUESTS = 4, 48, 8
ENCODES_AT_ONCE = 2
#: The limit of the guard, over the time per token that D has alone; the goal is 1.2.
LIMIT = 1.1
_QUIET, _QUIET_TRIES = 0.15, 20


def model(path: Path) -> Path:
    """A decode step of 4 sequences and a layer of the tower take some ten milliseconds each."""
    return make_model(
        path,
        hidden=768,
        layers=14,
        heads=24,
        kv_heads=8,
        intermediate=2304,
        vision_layers=8,
        vision_hidden=512,
        max_length=1024,
    )


def settings(cores: int, tpot_ms: float | None) -> dict[str, dict[str, Any]]:
    """Deployments by name: ``topology``, ``roles``, ``slo``, ``share`` and the rest of ``instances`` of each."""
    half = {"threads": max(1, cores // 2)}
    guard = {"tpot_ms": tpot_ms}
    return {
        "all cores, no guard": {"threads": cores},
        "all cores, guard": {"threads": cores, "slo": guard},
        "all cores, encoder nice, no guard": {"threads": cores, "roles": {"E": {"stream_priority": 19}}},
        "half of the cores each": {**half, "share": 0.5},
        "half of the cores each, guard": {**half, "share": 0.5, "slo": guard},
        "one instance, no guard": {"topology": "ED-P", "threads": cores},
        "one instance, guard": {"topology": "ED-P", "threads": cores, "slo": guard},
        "beside PD, all cores, no guard": {"topology": "(E-PD)", "threads": cores},
        "beside PD, all cores, guard": {"topology": "(E-PD)", "threads": cores, "slo": guard},
        "beside PD, half of the cores each": {"topology": "(E-PD)", **half, "share": 0.5},
        "beside PD, half of the cores each, guard": {"topology": "(E-PD)", **half, "share": 0.5, "slo": guard},
    }


async def measure(path: Path, setting: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Text requests alone and beside encodes, ``rounds`` times in turns."""
    setting = dict(setting)
    slo, roles = setting.pop("slo", {}), setting.pop("roles", {})
    share, topology = setting.pop("share", None), setting.pop("topology", DEFAULT_TOPOLOGY)
    if share is not None:
        shared = [role for role in ("E", "D", "PD") if role in topology.strip("()").replace(")", "").split("-")]
        roles = {role: {**roles.get(role, {}), "share": share} for role in shared}
    if topology.endswith("-P"):
        roles = {**roles, "P": {"threads": 1}}
    times: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    encodes, encoding_s, others = 0, 0.0, list[float]()
    async with deployed(topology, path, setting, roles=roles, slo=slo) as deployment:
        await text(deployment, 1)
        encoder = Encoder(deployment)
        await encoder.encode()
        for _ in range(rounds):
            others.append(await asyncio.to_thread(wait_for_quiet))
            times["alone"] += await text(deployment, REQUESTS)
            before, begun = encoder.num_done, time.perf_counter()
            stream = asyncio.create_task(encoder.keep_busy())
            times["beside"] += await text(deployment, REQUESTS)
            encodes, encoding_s = encodes + encoder.num_done - before, encoding_s + time.perf_counter() - begun
            stream.cancel()
            with suppress(asyncio.CancelledError):
                await stream
        await encoder.close()
    return {
        "alone": figures(times["alone"]),
        "beside": figures(times["beside"]),
        "encodes_per_s": encodes / encoding_s,
        "load_of_others": others,
        "topology": topology,
    }


def wait_for_quiet() -> float:
    """Wait a little for other work on the machine to end. Returns the share of its cores that is still taken."""
    for _ in range(_QUIET_TRIES):
        if (taken := psutil.cpu_percent(1.0) / 100) < _QUIET:
            break
    return taken


async def text(deployment: LocalDeployment, num_requests: int) -> list[list[float]]:
    """For each request the seconds between its tokens, from the second on: the first is made by P."""
    bodies = [greedy_chat(f"what is {i} and {time.time_ns()}", max_tokens=TOKENS) for i in range(num_requests)]
    timings = await closed_loop(deployment.gateway_url, CHAT_PATH, bodies, CONCURRENCY)
    return [list(np.diff(timing.tokens_s[1:])) for timing in timings]


class Encoder:
    """Encodes that go to E directly, each a new image; P takes the features and nobody asks for them."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self._peers = Peers()
        names = deployment.instances
        self._encoder = next(names[name].url for name in ("e0", "ed0") if name in names)
        self._prefill = next(names[name].url for name in ("p0", "pd0") if name in names)
        self._random = np.random.default_rng(0)
        self.num_done = 0

    async def encode(self) -> None:
        data = noise(int(self._random.integers(1 << 40)), SIDE, SIDE, "BMP")
        name = self._random.bytes(32).hex()
        request = wire.EncodeRequest(name[:16], wire.MediaRef(name, SIDE, SIDE), data, self._prefill)
        await self._peers.call(self._encoder, "/stage/encode", request, 120)
        self.num_done += 1

    async def keep_busy(self) -> None:
        async def one_after_the_other() -> None:
            while True:
                await self.encode()

        async with asyncio.TaskGroup() as group:
            for _ in range(ENCODES_AT_ONCE):
                group.create_task(one_after_the_other())

    async def close(self) -> None:
        await self._peers.close()


def figures(requests: list[list[float]]) -> dict[str, float]:
    """Milliseconds: the mean time per token of requests (TPOT), and of all single gaps (TBT)."""
    per_request = [1000 * statistics.fmean(gaps) for gaps in requests]
    gaps = [1000 * gap for request in requests for gap in request]
    return {
        "requests": len(requests),
        "tpot_ms_p50": float(np.percentile(per_request, 50)),
        "tpot_ms_p99": float(np.percentile(per_request, 99)),
        "tbt_ms_p50": float(np.percentile(gaps, 50)),
        "tbt_ms_p99": float(np.percentile(gaps, 99)),
    }


async def run(rounds: int, names: list[str], known: dict[str, Any], console: Console) -> dict[str, Any]:
    """Measure the named deployments; the others are taken from ``known`` results."""
    cores = len(os.sched_getaffinity(0))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = model(Path(directory) / "model")
        # by topology and threads: the time per token that D has alone
        limits: dict[tuple[str, int], float] = {}
        for name in settings(cores, None):
            setting = settings(cores, None)[name]
            key = (setting.get("topology", DEFAULT_TOPOLOGY), setting["threads"])
            if name in names:
                limit = LIMIT * limits[key] if key in limits else None
                results[name] = await measure(path, settings(cores, limit)[name], rounds)
                results[name]["limit_ms"] = limit if name.endswith(", guard") else None
                console.print(name, results[name])
            elif name in known:
                results[name] = known[name]
            if name in results:
                limits.setdefault(key, results[name]["alone"]["tpot_ms_p50"])
    return {
        "command": "python -m benchmarks.colocation",
        "machine": machine(),
        "image": f"{SIDE}x{SIDE}",
        "encodes_at_once": ENCODES_AT_ONCE,
        "concurrency": CONCURRENCY,
        "tokens": TOKENS,
        "deployments": results,
    }


def show(data: dict[str, Any], console: Console) -> None:
    table = Table(
        "topology",
        "deployment",
        "limit ms",
        "TPOT p50 alone",
        "beside",
        "TPOT p99 alone",
        "beside",
        "",
        "encodes/s",
    )
    for name, result in data["deployments"].items():
        alone, beside = result["alone"], result["beside"]
        table.add_row(
            result.get("topology", DEFAULT_TOPOLOGY),
            name,
            f"{result['limit_ms']:.1f}" if result["limit_ms"] else "",
            f"{alone['tpot_ms_p50']:.1f}",
            f"{beside['tpot_ms_p50']:.1f}",
            f"{alone['tpot_ms_p99']:.1f}",
            f"{beside['tpot_ms_p99']:.1f}",
            f"{beside['tpot_ms_p99'] / alone['tpot_ms_p99'] - 1:+.0%}",
            f"{result['encodes_per_s']:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    every = list(settings(len(os.sched_getaffinity(0)), None))
    parser.add_argument("--only", nargs="*", default=every, choices=every, help="measure these anew")
    arguments = parser.parse_args()
    console = Console(width=150)
    known = json.loads(RESULT.read_text())["deployments"] if RESULT.exists() else {}
    data = asyncio.run(run(arguments.rounds, arguments.only, known, console))
    write(RESULT, data)
    show(data, console)


if __name__ == "__main__":
    main()
