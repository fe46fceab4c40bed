"""The gateways that are compared, each as a command, and the benchmark's programs: compiled, started, measured."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SOURCES = Path(__file__).parent
_START_TIMEOUT_S = 60.0


def compile_programs(directory: Path) -> None:
    """``stage`` and ``load`` in ``directory``. Raises ValueError where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ValueError("the benchmark's stage instances and load generator are in C; install gcc")
    for name in ("stage", "load"):
        source = _SOURCES / f"{name}.c"
        subprocess.run([compiler, "-O2", "-Wall", "-o", str(directory / name), str(source)], check=True)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def running(command: list[str], log: Path, **more: Any) -> Iterator[psutil.Process]:
    """A program with its output in ``log``; ended with all its children."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **more)
    tree = psutil.Process(process.pid)
    try:
        yield tree
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone = [tree, *tree.children(recursive=True)]
            for one in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.terminate()
            _, alive = psutil.wait_procs(everyone, timeout=8)
            for one in alive:
                one.kill()
        process.wait()


def wait_until_served(port: int, body: bytes, log: Path) -> None:
    """Until a chat is answered with 200. Raises RuntimeError with the end of ``log``."""
    end = time.monotonic() + _START_TIMEOUT_S
    found = ""
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        headers = {"content-type": "application/json", "authorization": "Bearer benchmark"}
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            text = response.read()
            if response.status == 200 and b"[DONE]" in text:
                return
            found = f"{response.status} {text[:200]!r}"
        except (OSError, http.client.HTTPException) as error:
            found = repr(error)
        finally:
            connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"port {port} serves no chat ({found}); its log ends with: {log.read_text()[-1000:]}")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Seconds of CPU and bytes of resident memory of a process and all its children."""

    cpu_s: float
    rss_bytes: int


def usage(tree: psutil.Process) -> Usage:
    cpu_s, rss_bytes = 0.0, 0
    for one in (tree, *tree.children(recursive=True)):
        times = one.cpu_times()
        cpu_s += times.user + times.system + times.children_user + times.children_system
        rss_bytes += one.memory_info().rss
    return Usage(cpu_s=cpu_s, rss_bytes=rss_bytes)


def load(
    program: Path, port: int, body: Path, connections: int, seconds: float, tokens: int, rate: float
) -> dict[str, Any]:
    """One run of the load generator; its figures."""
    command = [str(program), *map(str, (port, body, connections, seconds, tokens, rate))]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Ports of the stage instances, by role."""

    encode: list[int]
    prefill: list[int]
    decode: list[int]

    @property
    def all(self) -> list[tuple[str, int]]:
        roles = (("E", self.encode), ("P", self.prefill), ("D", self.decode))
        return [(role, port) for role, ports in roles for port in ports]


def _urls(ports: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``command`` gives the argument list for (stages, port, directory for files)."""

    name: str
    what: str
    command: Callable[[Stages, int, Path], list[str]]


def ours() -> Peer:
    """Return this checkout's gateway."""

    def command(stages: Stages, port: int, directory: Path) -> list[str]:
        instances = [f"{role}{number}=http://127.0.0.1:{number}" for role, number in stages.all]
        log = str(directory / "access.log")
        return [sys.executable, "-m", "benchmarks.gateway.serve", str(port), log, *instances]

    return Peer(name="epd-serve", what="E, P and D; auth, metrics, validation, access log", command=command)


def vllm_epd(script: Path, python: str) -> Peer:
    def command(stages: Stages, port: int, _: Path) -> list[str]:
        return [
            python,
            str(script),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--encode-servers-urls", ",".join(_urls(stages.encode))),
            *("--prefill-servers-urls", ",".join(_urls(stages.prefill))),
            *("--decode-servers-urls", ",".join(_urls(stages.decode))),
        ]

    return Peer(name="vllm-epd", what="vLLM's disagg_epd_proxy.py: E, P and D", command=command)


def vllm_router(program: str) -> Peer:
    def command(stages: Stages, port: int, _: Path) -> list[str]:
        return [
            program,
            *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
            *("--worker-urls", *_urls(stages.decode)),
            *("--log-level", "warning", "--max-payload-size", str(1 << 28)),
        ]

    return Peer(name="vllm-router", what="Rust; one hop, no E, no P", command=command)
