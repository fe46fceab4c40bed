"""A deployment on a Ray cluster of five hosts that are network namespaces, and what the loss of its parts costs.

(E-P)-D on emulated NPUs, the gateway on a host of its own. An instance is killed, then a raylet, then a host loses
its power, then the GCS dies: once with Ray's own settings and without Redis, once with the guide's and with the
GCS in Redis, its head started again. Requests with new pictures are asked one after the other all the while.

Run as root with Ray installed: ``python -m benchmarks.ray`` from the root of the repository; redis-server must be
there.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, argument_parser, data_url, greedy_chat, machine, noise, write

sys.path.insert(0, str(ROOT / "tests" / "support"))

from hosts import Hosts, hosts

from epd_serve.config.keys import ADMIN_KEY

KEY = "admin-key-of-the-benchmark"
TUNED = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
MODEL = "qwen2.5-vl-7b"
WORKERS = ("a", "b", "c")
GCS_PORT, REDIS_PORT, PORT, ADMIN_PORT = 6379, 6390, 8000, 8001
#: Seconds between the death of the GCS and the head's next start.
HEAD_AWAY_S = 15.0
#: Ray gives up a GCS after 60 s.
WATCH_S = 110.0
LIMIT_S = 240.0
#: With the settings of the guide and the GCS in Redis, or with neither.
ROWS = {"tuned-redis": True, "plain": False}


class Cluster:
    """The hosts, Ray on them, and the deployment."""

    def __init__(self, lab: Hosts, directory: Path, *, tuned: bool, redis: bool) -> None:
        self.lab = lab
        self.directory = directory
        self.redis = redis
        checks = TUNED if tuned else {}
        self.environment = {
            **os.environ,
            **checks,
            ADMIN_KEY: KEY,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
        }
        if redis:
            self.environment["RAY_REDIS_ADDRESS"] = f"{lab['gw'].ip}:{REDIS_PORT}"
        self.file = directory / "pair.yaml"
        self.file.write_text(
            "topology: (E-P)-D\n"
            "devices: ['emulated:ascend-910b3 x 2']\n"
            f"model: {{shape_of: {MODEL}}}\n"
            f"gateway: {{host: {lab['gw'].ip}}}\n"
        )
        self.on = f"--on=ray={lab['head'].ip}:{GCS_PORT}"
        self.seed = 0

    def popen(self, host: str, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        inside = ["nsenter", "-t", str(self.lab[host].pid), "--net", "--mount", "--ipc", "--pid", "--uts", "--"]
        with (self.directory / log).open("ab") as output:
            return subprocess.Popen(
                [*inside, *command], env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def start_node(self, host: str) -> None:
        """Start Ray on a host, again where the machine is too slow for its limit of 30 s; wait until it runs."""
        process = self.start_ray(host)
        while "Ray runtime started" not in (self.directory / f"ray-{host}.log").read_text():
            if process.poll() is not None:
                process = self.start_ray(host)
            time.sleep(0.3)

    def start_ray(self, host: str) -> subprocess.Popen[bytes]:
        """In the foreground of a process of its own, as under systemd."""
        (self.directory / f"ray-{host}.log").unlink(missing_ok=True)
        ip = self.lab[host].ip
        command = [
            sys.executable,
            "-P",
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            f"--node-ip-address={ip}",
        ]
        command += ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
        if host == "head":
            command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        else:
            command += [f"--address={self.lab['head'].ip}:{GCS_PORT}"]
        if host in WORKERS:
            command += ['--resources={"NPU": 2}']
        return self.popen(host, command, f"ray-{host}.log")

    def start(self) -> None:
        Path("/tmp/ray").mkdir(exist_ok=True)
        for host in ("head", "gw", *WORKERS):
            assert self.popen(host, ["mount", "-t", "tmpfs", "tmpfs", "/tmp/ray"], "mount.log").wait() == 0
        if self.redis:
            address = ["--bind", self.lab["gw"].ip, "--port", str(REDIS_PORT)]
            self.popen("gw", ["redis-server", *address, "--save", "", "--protected-mode", "no"], "redis.log")
        for host in ("head", "gw", *WORKERS):
            self.start_node(host)
            say(host, "is up")

    def run(self, *arguments: str) -> float:
        """Seconds of a command of ``epd-serve`` on the head."""
        began = time.monotonic()
        code = self.popen(
            "head", [sys.executable, "-P", "-m", "epd_serve.cli", *arguments], "epd-serve.log"
        ).wait()
        assert code == 0, (self.directory / "epd-serve.log").read_text()[-4000:]
        return time.monotonic() - began

    # ------------------------------------------------------------------ what is there

    def processes(self, host: str, *words: str) -> list[psutil.Process]:
        """Those on a host whose command line has one of these words."""
        try:
            place = Path(f"/proc/{self.lab[host].pid}/ns/net").readlink()
        except FileNotFoundError:  # it has no power
            return []
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if (
                    Path(f"/proc/{process.pid}/ns/net").readlink() != place
                    or process.status() == psutil.STATUS_ZOMBIE
                ):
                    continue
                if any(word in " ".join(process.cmdline()[:6]) for word in words):
                    found.append(process)
        return found

    def instance(self, name: str) -> tuple[str, psutil.Process]:
        """The host and the process of an instance."""
        for host in WORKERS:
            for process in self.processes(host, "epd_serve.cli instance"):
                if f'"name": "{name}"' in " ".join(process.cmdline()):
                    return host, process
        raise LookupError(name)

    def pss_mib(self) -> dict[str, Any]:
        """Memory of Ray on the head and on a worker, of an actor, and of the unit that it runs."""

        def mib(found: Sequence[psutil.Process]) -> int:
            return round(sum(one.memory_full_info().pss for one in found) / 2**20)

        host = self.instance("d0")[0]
        rays = ("gcs_server", "raylet/raylet", "ray::", "ray/", "ray.scripts")
        actors = {one.pid for one in self.processes(host, "ray::d0", "ray::Agent")}
        return {
            "head": mib(self.processes("head", *rays)),
            "worker": mib([one for one in self.processes(host, *rays) if one.pid not in actors]),
            "actor": mib([one for one in self.processes(host, *rays) if one.pid in actors]),
            "unit": mib(self.processes(host, "--unit")),
        }

    def get(self, url: str, body: Any = None, timeout_s: float = 180.0) -> Any:
        """The JSON of an answer, asked from the gateway's host."""
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.lab['gw'].ip}:{url}", data, headers)

        def ask() -> Any:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)

        return self.lab["gw"].run(ask)

    def ready(self) -> bool:
        with suppress(OSError):
            shown = self.get(f"{ADMIN_PORT}/admin/instances", timeout_s=5)["instances"]
            return {one["name"] for one in shown if one["ready"]} == {"e0", "p0", "d0"}
        return False

    def ask(self) -> bool:
        """Whether a request with a new picture is answered."""
        self.seed += 1
        url = data_url(noise(self.seed, 96, 72))
        body = greedy_chat("What is it?", [url], max_tokens=8, model=MODEL)
        try:
            return bool(self.get(f"{PORT}/v1/chat/completions", body)["choices"][0]["message"]["content"])
        except OSError:
            return False

    def watch(self, until_ready: bool = True, seconds: float = LIMIT_S) -> dict[str, Any]:
        """Ask without a pause until all instances are ready again, or for some seconds."""
        began = time.monotonic()
        asked: list[tuple[float, bool, float]] = []
        while (now := time.monotonic() - began) < seconds:
            right = self.ask()
            asked.append((round(now, 1), right, round(time.monotonic() - began - now, 1)))
            if until_ready and right and now > 2 and self.ready():
                break
            if not right:
                time.sleep(0.5)
        failed = [one for one in asked if not one[1]]
        ended = round(time.monotonic() - began, 1)
        return {
            "asked": len(asked),
            "failed": len(failed),
            "first_failed_s": failed[0][0] if failed else None,
            "last_failed_s": failed[-1][0] if failed else None,
            "slowest_s": max(one[2] for one in asked),
            **({"ready_s": ended if self.ready() else None} if until_ready else {"watched_s": ended}),
        }


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)


def measure(cluster: Cluster) -> dict[str, Any]:
    """The row of one cluster."""
    cluster.start()
    row: dict[str, Any] = {"up_s": round(cluster.run("up", str(cluster.file), cluster.on, "--spread=host"), 1)}
    assert all(cluster.ask() for _ in range(3))
    row["pss_mib"] = cluster.pss_mib()
    say("up", row)
    kill([cluster.instance("d0")[1]])
    say("killed process", row.setdefault("killed_process", cluster.watch()))
    kill(cluster.processes(cluster.instance("d0")[0], "raylet/raylet"))
    say("killed raylet", row.setdefault("killed_raylet", cluster.watch()))
    cluster.lab.power_off(cluster.instance("e0")[0])
    say("power", row.setdefault("power", cluster.watch()))
    kill(cluster.processes("head", "gcs_server"))
    if cluster.redis:
        row["gcs"] = cluster.watch(until_ready=False, seconds=HEAD_AWAY_S)
        cluster.start_ray("head")
        row["gcs_back"] = cluster.watch(until_ready=False, seconds=WATCH_S - HEAD_AWAY_S)
        say("GCS", row["gcs"], row["gcs_back"])
        kill(cluster.processes(cluster.instance("d0")[0], "ray::d0", "ray::Agent"))
        say("killed actor", row.setdefault("then_killed_actor", cluster.watch()))
        row["down_s"] = round(cluster.run("down", str(cluster.file), cluster.on), 1)
    else:
        say("GCS", row.setdefault("gcs", cluster.watch(until_ready=False, seconds=WATCH_S)))
    return row


def say(*words: object) -> None:
    print(time.strftime("%X"), *words, flush=True)


async def run(*, tuned: bool, redis: bool) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="epd-serve-ray-bench-"))
    try:
        async with hosts(["head", "gw", *WORKERS], directory) as lab:
            return measure(Cluster(lab, directory, tuned=tuned, redis=redis))
    finally:
        if sys.exc_info()[0] is None:
            shutil.rmtree(directory)
        else:
            print("logs:", directory)


def main() -> None:
    parser = argument_parser(__doc__, "ray.json")
    parser.add_argument("--only", choices=ROWS, help="This row; the others of the result file stay.")
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed")
    about = {"command": "python -m benchmarks.ray", "machine": f"{machine()}, shared", "ray": _ray_version()}
    for name in [arguments.only] if arguments.only else ROWS:
        row = asyncio.run(run(tuned=ROWS[name], redis=ROWS[name]))
        rows = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else {}
        print(write(arguments.output, {**about, "hosts": 5, "topology": "(E-P)-D", "rows": {**rows, name: row}}))


def _ray_version() -> str:
    import ray

    return str(ray.__version__)


if __name__ == "__main__":
    main()
