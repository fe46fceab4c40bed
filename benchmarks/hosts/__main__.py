"""Deployments over many hosts, in namespaces of this machine, on links that are slow, lose packets and break.

``same``: E | P | D on a host each, over 1 Gbit/s with a round trip of 1 ms: answers are those of one host; then
with 1 % of the packets lost, 40 new pictures; then with clocks that are days apart. ``faults``: requests while
hosts are cut off, lose their power, and pairs of hosts lose sight of each other. ``cluster``: 32 instances on 4
hosts of 8 emulated accelerators, under load, and one host is lost and comes back.

Run as root as ``python -m benchmarks.hosts [same] [faults] [cluster]`` from the repository's root; the exit code
is 1 where an answer was wrong, a request hung or something leaked. Each part is written beside the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from benchmarks.common import argument_parser, machine, write
from benchmarks.hosts.lab import URL, Clock, Lab, lab, own_network
from benchmarks.traffic import mixed_requests, report_of
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.verify.check import Failed
from epd_serve.verify.client import Client
from epd_serve.verify.items import asked, noise
from epd_serve.verify.traffic import BAD, Outcome, Request, Traffic

#: 1 Gbit/s, a round trip of 1 ms.
LINK = {"rate_bps": 1e9, "delay_s": 0.0005}
#: For an answer, or an error; more where the machine is so busy that an undisturbed answer takes a third of it.
DEADLINE_S = 60.0
_LEARNING_S = 600.0
#: Requests under faults are asked so often each, which leaves time for faults.
_TIMES = 5
LEASE_S = 3.0
_SETTLE_S = 90.0
_MODEL, _CHIP, _PER_HOST = "qwen2.5-vl-7b", "emulated:ascend-910b3", 8
#: Few blocks and small caches, so that requests wait for each other at every stage.
_INSTANCES = {
    "threads": 1,
    "lease_s": LEASE_S,
    "feature_timeout_s": 12,
    "num_blocks": 120,
    "max_num_batched_tokens": 64,
    "feature_store_bytes": 1 << 20,
    "feature_cache_bytes": 1 << 19,
}


def _config(topology: str, devices: Sequence[str], deadline_s: float = DEADLINE_S, **more: Any) -> dict[str, Any]:
    hosts = list(dict.fromkeys(device.partition("/")[0] for device in devices))
    gateway = {"request_timeout_s": deadline_s * 0.75}
    return {"topology": topology, "devices": list(devices), "hosts": hosts, "gateway": gateway, **more}


def _model(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The kind of device, and the keys of the model."""
    return (_CHIP, {"model": {"shape_of": _MODEL}, "engine": "native"}) if arguments.emulated else ("cpu", {})


def _model_name(arguments: argparse.Namespace) -> str:
    return f"{_MODEL} without weights, on {_CHIP}; nothing is computed" if arguments.emulated else "demo"


def _pictures(first: int, count: int) -> list[Request]:
    fields = {"max_tokens": 16, "ignore_eos": True, "skip_special_tokens": False}
    return [
        Request(key=f"picture {seed}", content=asked(noise(seed), text="What is in the picture?"), fields=fields)
        for seed in range(first, first + count)
    ]


async def _client(url: str) -> Client:
    client = Client(url)
    await client.meet()
    return client


async def answers_of_one_host(
    directory: Path, requests: Sequence[Request], arguments: argparse.Namespace
) -> tuple[dict[str, str], float]:
    """Each request's answer by E-P-D on one host, and the deadline for others."""
    devices, model = _model(arguments)
    config = DeploymentConfig(
        devices=[f"{devices} x 3"] if arguments.emulated else [devices],
        gateway={"port": 0},
        instances={**_INSTANCES, "base_port": 0},
        **model,
    )
    async with LocalDeployment(config, log_dir=directory, ready_timeout_s=180) as deployment:
        traffic = Traffic(await _client(deployment.gateway_url), deadline_s=_LEARNING_S)
        slowest_s = 0.0
        for one in {each.key: each for each in requests}.values():
            began = time.monotonic()
            await traffic.learn([one], 1)
            slowest_s = max(slowest_s, time.monotonic() - began)
        await traffic.client.close()
    return traffic.expected, max(DEADLINE_S, 3 * slowest_s)


async def _ask(running: Lab, requests: Sequence[Request], expected: dict[str, str]) -> dict[str, Any]:
    """Ask one at a time, which says how long each takes by itself."""
    traffic = Traffic(await _client(URL), deadline_s=_LEARNING_S)
    traffic.expected = expected
    await traffic.ask_all(requests, 1)
    seconds = sorted(result.seconds for _, result in traffic.results)
    await traffic.client.close()
    return {
        "requests": len(seconds),
        "identical": traffic.outcomes()[Outcome.IDENTICAL],
        "wrong": traffic.wrong(),
        "median_s": round(median(seconds), 3),
        "longest_s": round(seconds[-1], 3),
        "within_1_s": sum(one <= 1 for one in seconds),
        "held": await _settled(running),
    }


async def _settled(running: Lab, timeout_s: float = _SETTLE_S) -> dict[str, Any]:
    """Things that are still held, after all of it had time to come back."""
    until = time.monotonic() + timeout_s
    while (held := await running.held()) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    return held


async def same(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    requests = mixed_requests(arguments.requests // 20, 1, patient=True) + _pictures(500, 8)
    lossy, skewed = _pictures(600, 40), _pictures(700, 12)
    expected, deadline_s = await answers_of_one_host(directory / "one", [*requests, *lossy, *skewed], arguments)
    report: dict[str, Any] = {}
    chip, model = _model(arguments)
    devices = [f"n{number}/{chip}{':0' if arguments.emulated else ''}" for number in range(1, 4)]
    config = _config("E-P-D", devices, deadline_s, instances=_INSTANCES, **model)
    report["model"] = _model_name(arguments)
    async with lab(directory / "link", config, **LINK) as running:
        report["ready_s"] = round(await running.until_ready(3), 1)
        report["link"] = await _ask(running, requests, expected)
        running.shape(loss=0.01)
        report["loss_1_percent"] = await _ask(running, lossy, expected)
        ways = running.wire.ways().values()
        report["loss_1_percent"]["packets"] = sum(way["packets"] for way in ways)
        report["loss_1_percent"]["dropped"] = sum(way["dropped"] for way in ways)
    hours = 3600
    clocks = {
        "n1": Clock(monotonic_s=240 * hours, wall_s=36 * hours),
        "n2": Clock(monotonic_s=14 * hours, wall_s=-36 * hours),
        "n3": Clock(monotonic_s=5),
    }
    async with lab(directory / "clocks", config, clocks, **LINK) as running:
        await running.until_ready(3)
        up = {
            name: float(machine.out("cat", "/proc/uptime").split()[0])
            for name, machine in running.machines.items()
        }
        report["clocks"] = {
            "monotonic_ahead_s": {name: round(at - min(up.values())) for name, at in up.items()},
            "wall_ahead_s": {name: clock.wall_s for name, clock in clocks.items()},
            **await _ask(running, skewed, expected),
        }
    parts = [report[name] for name in ("link", "loss_1_percent", "clocks")]
    report["passed"] = all(one["identical"] == one["requests"] and not one["held"] for one in parts)
    return report


class Faults:
    """One fault after the other, each mended before the next but one."""

    def __init__(self, running: Lab, seed: int, interval_s: float) -> None:
        self.running, self.rng, self.interval_s = running, random.Random(seed), interval_s
        self.count: Counter[str] = Counter()
        self._lost: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Until cancelled; what is broken then is mended."""
        kinds: list[str] = []
        try:
            while True:
                await asyncio.sleep(self.interval_s * self.rng.uniform(0.5, 1.5))
                kinds = kinds or self.rng.sample(["cut", "pair", "power"], 3)
                await getattr(self, f"_{kinds.pop()}")()
        finally:
            for name in self.running.machines:
                self.running.isolate(name, up=True)

    def _host(self) -> str:
        return self.rng.choice(sorted(self.running.machines))

    async def _cut(self) -> None:
        """A host is silent for some seconds, up to three leases."""
        name = self._host()
        self.count["hosts cut off"] += 1
        self.running.isolate(name)
        await asyncio.sleep(self.rng.uniform(0.5, 3 * LEASE_S))
        self.running.isolate(name, up=True)

    async def _pair(self) -> None:
        """Two hosts do not see each other; the gateway sees both."""
        one, other = self.rng.sample(sorted(self.running.machines), 2)
        self.count["pairs parted"] += 1
        self.running.link(one, other, up=False)
        await asyncio.sleep(self.rng.uniform(1, 12))
        self.running.link(one, other, up=True)

    async def _power(self) -> None:
        """A host loses its power and starts anew."""
        name = self._host()
        self.count["power losses"] += 1
        self.running.power_off(name)
        try:
            await asyncio.sleep(self.rng.uniform(1, 6))
        finally:
            self.running.boot(name)


async def faults(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    requests = mixed_requests(arguments.requests // _TIMES, arguments.seed) * _TIMES
    expected, deadline_s = await answers_of_one_host(directory / "one", requests, arguments)
    chip, model = _model(arguments)
    devices = [f"n{number}/{chip}{':0' if arguments.emulated else ''}" for number in range(1, 7)]
    config = _config("2E-2P-2D", devices, deadline_s, instances=_INSTANCES, **model)
    async with lab(directory / "faults", config, **LINK) as running:
        ready_s = await running.until_ready(6)
        traffic = Traffic(await _client(URL), deadline_s=deadline_s)
        traffic.expected = expected
        breaking = Faults(running, arguments.seed, arguments.interval)
        task = asyncio.create_task(breaking.run())
        began = time.monotonic()
        await traffic.ask_all(requests, arguments.concurrency)
        seconds = time.monotonic() - began
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        back_s = await running.until_ready(6)
        held = await _settled(running)
        books = ""
        try:
            await traffic.client.balanced(_SETTLE_S)
        except Failed as failed:
            books = str(failed)
        await traffic.client.close()
    report = report_of(traffic)
    bad = any(report["outcomes"][outcome.value] for outcome in BAD)
    return {
        "hosts": {"n1, n2": "E", "n3, n4": "P", "n5, n6": "D"},
        "model": _model_name(arguments),
        "ready_s": round(ready_s, 1),
        "seconds": round(seconds, 1),
        "faults": dict(breaking.count),
        "all_ready_after_s": round(back_s, 1),
        "deadline_s": round(deadline_s, 1),
        "longest_s": round(max(result.seconds for _, result in traffic.results), 1),
        **report,
        "held": held,
        "gateway_books": books or "balanced",
        "passed": not (bad or held or books),
    }


def _memory(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """MiB of each instance, what it shares with others counted in parts (PSS)."""
    each = sorted(one.memory_full_info().pss / 2**20 for one in processes)
    return {
        "instances": len(each),
        "median_pss_mib": round(median(each), 1),
        "largest_pss_mib": round(each[-1], 1),
    }


def _cluster_devices(hosts: Sequence[str]) -> list[str]:
    """For 8E-8P-16D: two E, two P and four D on each host."""
    return [
        f"{host}/{_CHIP}:{index}"
        for indices in ((0, 1), (2, 3), (4, 5, 6, 7))
        for host in hosts
        for index in indices
    ]


async def cluster(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    hosts = ["n1", "n2", "n3", "n4"]
    config = _config("8E-8P-16D", _cluster_devices(hosts), model={"shape_of": _MODEL}, engine="native", gateway={})
    fields = {"max_tokens": 32, "ignore_eos": True, "stream": True}
    questions = [
        Request(
            key=f"{number}",
            content=asked(noise(number), text=f"What is {number}?") if number % 2 else f"What is {number}?",
            fields=fields,
        )
        for number in range(24)
    ]
    async with lab(directory / "cluster", config, **LINK) as running:
        ready_s = await running.until_ready(4 * _PER_HOST, 500)
        traffic = Traffic(await _client(URL), deadline_s=DEADLINE_S)
        await traffic.learn(questions, 4)
        memory = _memory(running.instance_processes())
        over = asyncio.Event()
        load = asyncio.create_task(traffic.ask_until(questions, arguments.concurrency, over))
        marks: dict[str, int] = {}

        async def pause(name: str, seconds: float) -> None:
            before = len(traffic.results)
            await asyncio.sleep(seconds)
            marks[name] = round((len(traffic.results) - before) / seconds)

        await pause("before", arguments.seconds)
        running.power_off("n3")
        lost_at = time.monotonic()
        while len(await running.ready()) > 3 * _PER_HOST:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        noticed_s = time.monotonic() - lost_at
        await pause("without_n3", arguments.seconds)
        running.boot("n3")
        back_s = await running.until_ready(4 * _PER_HOST, 500)
        await pause("after", arguments.seconds)
        over.set()
        await load
        held = await _settled(running)
        at_end = _memory(running.instance_processes())
        await traffic.client.close()
    report = report_of(traffic)
    bad = any(report["outcomes"][outcome.value] for outcome in BAD)
    return {
        "emulated": f"8E-8P-16D on 4 hosts of 8 {_CHIP}: {_MODEL} without weights; nothing is computed",
        "clients": arguments.concurrency,
        "ready_s": round(ready_s, 1),
        "requests_per_s": marks,
        "lost_host_noticed_after_s": round(noticed_s, 1),
        "ready_again_after_its_start_s": round(back_s, 1),
        "longest_s": round(max(result.seconds for _, result in traffic.results), 1),
        "memory": {"at_start": memory, "in_the_end": at_end},
        **report,
        "held": held,
        "passed": not (bad or held),
    }


_PARTS: Mapping[str, Callable[[Path, argparse.Namespace], Any]] = {
    "same": same,
    "faults": faults,
    "cluster": cluster,
}


def _command(name: str, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The command of one part, with the options that are not as by default."""
    words = ["python -m benchmarks.hosts", name]
    for option, value in vars(arguments).items():
        if option not in ("parts", "output") and value != parser.get_default(option):
            words.append(f"--{option}" if value is True else f"--{option} {value:g}")
    return " ".join(words)


def main() -> int:
    parser = argument_parser(__doc__, "hosts.json")
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*_PARTS, []], help="all by default")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=float, default=6.0, help="mean seconds between two faults")
    parser.add_argument(
        "--emulated", action="store_true", help="same and faults without a model's own computation"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase of the cluster's load")
    arguments = parser.parse_args()
    own_network()
    found = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    directory = Path(tempfile.mkdtemp(prefix="epd-serve-hosts-"))
    passed = True
    for name in arguments.parts or _PARTS:
        report = asyncio.run(_PARTS[name](directory / name, arguments))
        load = round(psutil.getloadavg()[0], 1)
        report = {
            "command": _command(name, parser, arguments),
            "machine": machine(),
            "load_average": load,
            **report,
        }
        Console().print_json(data=report)
        found[name] = report
        passed = passed and report["passed"]
        write(arguments.output, found)
    print(f"logs: {directory}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
