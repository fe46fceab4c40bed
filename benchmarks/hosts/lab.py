"""Machines made of namespaces, one of them this process, and a deployment over them by agents."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hosts.wire import Wire, address_lines, tun
from epd_serve.config.keys import ADMIN_KEY
from epd_serve.errors import ServeError
from epd_serve.rpc.admin import AdminClient, AdminError
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.rpc.http import HttpCall, HttpPool

GATEWAY = "gw"
URL = "http://127.0.0.1:8000"
_ADMIN = "http://10.0.0.1:8001"
_KEYS = {ADMIN_KEY: "admin-key-of-the-lab", CLUSTER_KEY: "cluster-key-of-the-lab"}
_PROGRAM = (sys.executable, "-P", "-m", "epd_serve.cli")
_CLONE_NEWNET = 0x4000_0000
#: The first process of a machine takes in orphans and leaves no zombie.
_FIRST = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 shm /dev/shm
echo ready
exec "$2" -S -c 'import os, time
while True:
    try: os.waitpid(-1, 0)
    except ChildProcessError: time.sleep(0.1)'
"""


def own_network() -> None:
    """Give this process, which has one thread yet, a network of its own. Raises OSError where that takes root."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network of its own takes root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ.update(_KEYS)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Seconds by which a machine's clocks are ahead."""

    monotonic_s: int = 0
    wall_s: int = 0


class Machine:
    """A host with network, mounts, IPC, processes, name and, if asked, clocks of its own."""

    def __init__(self, name: str, address: str, clock: Clock, shim: Path | None) -> None:
        self.name, self.address = name, address
        self._wall = {}
        if clock.wall_s:
            assert shim is not None
            self._wall = {"LD_PRELOAD": str(shim), "WALL_CLOCK_OFFSET": str(clock.wall_s)}
        ahead = str(clock.monotonic_s)
        clocks = ["--time", "--monotonic", ahead, "--boottime", ahead] if clock.monotonic_s else []
        spaces = ["--net", "--mount", "--ipc", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        self._first = subprocess.Popen(
            ["unshare", *clocks, *spaces, "sh", "-c", _FIRST, "sh", name, sys.executable],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        with self._first.stdout:
            if self._first.stdout.readline() != "ready\n":
                raise OSError(f"machine {name} cannot be made")
        (child,) = psutil.Process(self._first.pid).children()
        self.pid = child.pid
        self._enter = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--ipc", "--pid", "--uts"]
        self._enter += ["--time"] if clock.monotonic_s else []

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Run a command there; its output is appended to a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._wall, "HOME": "/tmp", **environment},
            )

    def out(self, *command: str) -> str:
        """The output of a command there."""
        return subprocess.run([*self._enter, *command], check=True, capture_output=True, text=True).stdout

    def kill(self) -> None:
        """End all that runs there at once."""
        os.kill(self.pid, signal.SIGKILL)
        self._first.wait()


class Lab:
    """A deployment over machines: its gateway beside this process, an agent on each of the others."""

    def __init__(self, directory: Path, config: Mapping[str, Any], clocks: Mapping[str, Clock]) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._clocks = clocks
        self.addresses = {GATEWAY: "10.0.0.1"}
        for index, name in enumerate(config["hosts"], start=2):
            self.addresses[name] = f"10.0.0.{index}"
        hosts = {name: {"address": self.addresses[name]} for name in config["hosts"]}
        gateway = {"host": "127.0.0.1", "port": 8000, **config.get("gateway", {})}
        gateway["admin"] = {"host": "0.0.0.0", "port": 8001, "key": {"env": ADMIN_KEY}}
        instances = {"base_port": 8100, **config.get("instances", {})}
        whole = {**config, "hosts": hosts, "gateway": gateway, "instances": instances}
        self.file = directory / "deployment.yaml"
        self.file.write_text(json.dumps({**whole, "cluster_key": {"env": CLUSTER_KEY}}))
        self.wire = Wire()
        self.machines: dict[str, Machine] = {}
        self._shape: dict[str, float] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.admin = AdminClient(_ADMIN, {"authorization": f"Bearer {_KEYS[ADMIN_KEY]}"})

    def boot(self, name: str) -> None:
        """A machine with its agent, new or in place of one that has lost its power."""
        clock, shim = self._clocks.get(name, Clock()), None
        if clock.wall_s:
            shim = self._directory / "clock.so"
            source = Path(__file__).with_name("clock.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True)
        machine = self.machines[name] = Machine(name, self.addresses[name], clock, shim)
        self._connect(name, machine.pid)
        command = [*_PROGRAM, "agent", str(self.file), "--host-name", name, "--join", _ADMIN]
        own = {"EPD_SERVE_LOG_DIR": str(self._directory / name), "EPD_SERVE_RUNTIME_DIR": f"/tmp/epd-serve-{name}"}
        self._processes.append(machine.start(command, self._directory / f"{name}.log", **own))

    def start(self) -> None:
        """The gateway, and a machine for each host."""
        self._connect(GATEWAY, os.getpid())
        with (self._directory / "gateway.log").open("ab") as log:
            command = [*_PROGRAM, "proxy", "--config", str(self.file)]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        for name in self.addresses.keys() - {GATEWAY}:
            self.boot(name)

    def shape(self, **changes: float) -> None:
        """Have all ways like this, also those of machines that come."""
        self._shape = {**self._shape, **changes}
        for one, other in permutations({GATEWAY, *self.machines}, 2):
            self.wire.set(self.addresses[one], self.addresses[other], **changes)

    def link(self, one: str, other: str, *, up: bool) -> None:
        for a, b in ((one, other), (other, one)):
            self.wire.set(self.addresses[a], self.addresses[b], up=up)

    def isolate(self, name: str, *, up: bool = False) -> None:
        for other in {GATEWAY, *self.machines} - {name}:
            self.link(name, other, up=up)

    def power_off(self, name: str) -> None:
        """All that runs there is gone, and nobody hears of it."""
        self.isolate(name)
        self.machines.pop(name).kill()

    async def ready(self) -> dict[str, str]:
        """The instances that the gateway gives work, with their URLs."""
        try:
            shown = (await self.admin.ask("GET", "/instances", timeout_s=10))["instances"]
        except (AdminError, TimeoutError):
            return {}
        return {one["name"]: one["url"] for one in shown if one["ready"]}

    async def until_ready(self, number: int, timeout_s: float = 300) -> float:
        """Return the seconds until so many instances are ready. Raises TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while len(await self.ready()) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def held(self) -> dict[str, Any]:
        """Things that instances hold; an instance that does not answer holds ``unknown``."""
        found = {}
        for name, url in (await self.ready()).items():
            try:
                async with HttpPool(name, url, _KEYS[CLUSTER_KEY]) as pool, asyncio.timeout(10):
                    held = json.loads(await HttpCall(pool, "GET", "/integrity").ask())
            except (ServeError, TimeoutError) as error:
                held = {"unknown": str(error)}
            if any(held.values()):
                found[name] = held
        return found

    def instance_processes(self) -> list[psutil.Process]:
        """Those of all machines."""
        found = []
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # one that has ended
                if "--options" in one.cmdline():
                    found.append(one)
        return found

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        for process in self._processes:
            process.kill()
            process.wait()
        self.wire.close()

    def _connect(self, name: str, pid: int) -> None:
        self.wire.connect(self.addresses[name], tun(pid, "net0"))
        lines = "\n".join(address_lines(self.addresses[name], "net0"))
        enter = ["nsenter", "-t", str(pid), "--net", "ip", "-batch", "-"]
        subprocess.run(enter, input=lines, text=True, check=True)
        if self._shape:
            for other in {GATEWAY, *self.machines} - {name}:
                for a, b in ((name, other), (other, name)):
                    self.wire.set(self.addresses[a], self.addresses[b], **self._shape)


@asynccontextmanager
async def lab(
    directory: Path, config: Mapping[str, Any], clocks: Mapping[str, Clock] | None = None, **shape: float
) -> AsyncIterator[Lab]:
    """Within, a deployment over hosts that starts; ``config`` as in a deployment file, ``hosts`` are names."""
    made = Lab(directory, config, clocks or {})
    try:
        made.shape(**shape)
        made.start()
        yield made
    finally:
        made.close()
