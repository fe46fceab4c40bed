"""``epd-serve verify`` against the field: our deployments of both engines, vLLM alone, other routers before vLLM.

Every server has the built-in model in float32. The greedy answers of a vLLM alone are the reference for all
others, and those of one native instance for it.

    python -m benchmarks.verify_field --vllm-python PYTHON [--proxy disagg_epd_proxy.py] [--router vllm-router]
    python -m benchmarks.verify_field --tables      prints the tables of docs/reports/verify.md
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import RESULTS, argument_parser, machine, write
from benchmarks.gateway.programs import free_ports, running
from epd_serve.demo import weights_dir
from epd_serve.verify.check import CHECKS, Report
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands
from epd_serve.verify.runner import chosen, run_checks

RESULT = RESULTS / "verify-field.json"
#: The command, without the paths of a machine.
COMMAND = (
    "python -m benchmarks.verify_field --vllm-python PYTHON --proxy disagg_epd_proxy.py --router vllm-router "
    "--sglang-router sglang-router"
)
_MARKS = {"pass": "✓", "fail": "**✗**", "unjudged": "?", "skipped": "–"}
_READY_S = 600.0
_ENGINE_FLAGS = {"enforce_eager": True, "chat_template_content_format": "openai"}


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server under test, and the commands for its faults."""

    url: str
    admin: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The programs of others.

    Attributes:
        python: of an environment that has vLLM.
        proxy: vLLM's disagg_epd_proxy.py.
        router, sglang_router: the programs vllm-router and sglang-router.
    """

    python: str
    proxy: Path | None
    router: str | None
    sglang_router: str | None


@contextmanager
def ours(topology: str, engine: str, peers: Peers, logs: Path) -> Iterator[Running]:
    config: dict[str, Any] = {"topology": topology, "model": "demo", "dtype": "float32", "engine": engine}
    config["instances"] = {"threads": 1, "max_model_len": 1024, "max_num_seqs": 32}
    if engine == "vllm":
        config["vllm"] = {"python": peers.python}
        config["instances"]["engine_args"] = _ENGINE_FLAGS
    file = logs / "deployment.yaml"
    file.write_text(json.dumps(config))
    with up(file, logs) as server:
        yield server


@contextmanager
def up(file: Path, logs: Path) -> Iterator[Running]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "epd_serve.cli", "up", str(file), "--port", str(port)]
    with running(command, logs / "up.log") as process:
        yield _ready(process, port, logs / "up.log", [f"up:{process.pid}"])


def _vllm(peers: Peers, port: int, *flags: str) -> list[str]:
    command = [peers.python, "-m", "vllm.entrypoints.cli.main", "serve", str(weights_dir()), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
    command += ["--chat-template-content-format", "openai", "--max-model-len", "1024", "--max-num-seqs", "32"]
    return [*command, *flags]


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def vllm_alone(peers: Peers, logs: Path) -> Iterator[Running]:
    (port,) = free_ports(1)
    with running(_vllm(peers, port), logs / "vllm.log", env=_environment()) as process:
        yield _ready(process, port, logs / "vllm.log")


@contextmanager
def _router(program: str | None, peers: Peers, logs: Path, *flags: str) -> Iterator[Running]:
    """A router before one vLLM."""
    assert program is not None, "--router and --sglang-router name the programs"
    port, metrics = free_ports(2)
    with vllm_alone(peers, logs) as alone:
        command = [program, *flags, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", alone.url]
        command += ["--policy", "round_robin", "--prometheus-port", str(metrics)]
        command += ["--max-payload-size", str(1 << 28)]
        with running(command, logs / "router.log") as process:
            yield _ready(process, port, logs / "router.log", [f"kill-router=kill -KILL {process.pid}"])


def vllm_router(peers: Peers, logs: Path) -> AbstractContextManager[Running]:
    return _router(peers.router, peers, logs)


def sglang_router(peers: Peers, logs: Path) -> AbstractContextManager[Running]:
    return _router(peers.sglang_router, peers, logs, "launch", "--backend", "openai")


@contextmanager
def vllm_proxy(peers: Peers, logs: Path) -> Iterator[Running]:
    """vLLM's example: its proxy, an encoder, and a server that prefills and decodes; features go through files."""
    assert peers.proxy is not None
    encoder, rest, port = free_ports(3)
    features = logs / "features"
    features.mkdir()

    def transfer(role: str) -> str:
        extra = {"shared_storage_path": str(features)}
        config = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": extra}
        return json.dumps(config)

    producer = ["--ec-transfer-config", transfer("ec_producer"), "--no-enable-prefix-caching"]
    with ExitStack() as stack:
        command = _vllm(peers, encoder, *producer)
        e = stack.enter_context(running(command, logs / "encoder.log", env=_environment()))
        command = _vllm(peers, rest, "--ec-transfer-config", transfer("ec_consumer"))
        pd = stack.enter_context(running(command, logs / "rest.log", env=_environment()))
        for process, number, log in ((e, encoder, "encoder.log"), (pd, rest, "rest.log")):
            _ready(process, number, logs / log)
        command = [peers.python, str(peers.proxy), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--encode-servers-urls", f"http://127.0.0.1:{encoder}", "--prefill-servers-urls", "disable"]
        command += ["--decode-servers-urls", f"http://127.0.0.1:{rest}"]
        proxy = stack.enter_context(running(command, logs / "proxy.log", env=_environment()))
        yield _ready(proxy, port, logs / "proxy.log", [f"pids:E={e.pid},D={pd.pid}"])


def _ready(process: psutil.Process, port: int, log: Path, admin: Sequence[str] = ()) -> Running:
    """Wait for a chat with a 200. Raises RuntimeError with the end of the log."""
    url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    while time.monotonic() < end_s and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        try:
            if httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False).status_code == 200:
                return Running(url=url, admin=admin)
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise RuntimeError(f"{url} does not answer; its log ends with {log.read_text()[-2000:]}")


#: Name → what makes the server.
SERVERS: dict[str, Any] = {
    "vLLM alone": vllm_alone,
    **{f"epd-serve, native, {shape}": (shape, "native") for shape in ("EPD", "E-PD", "EP-D", "E-P-D")},
    **{f"epd-serve, vLLM, {shape}": (shape, "vllm") for shape in ("EPD", "E-PD", "EP-D", "E-P-D")},
    "vLLM's disagg_epd_proxy, E-PD": vllm_proxy,
    "vllm-router, vLLM alone": vllm_router,
    "sglang-router, vLLM alone": sglang_router,
}


async def verified(server: Running, record: Path, directory: Path) -> Report:
    admin = admin_commands(server.admin)
    client = Client(server.url, model="demo", record=record, admin=admin, slowness=4.0)
    try:
        return await run_checks(client, chosen(()), directory)
    finally:
        await client.close()


def kept(report: Report) -> dict[str, dict[str, Any]]:
    """Results by check, without the lines that repeat a request on this machine."""
    return {
        one.check: {"outcome": one.outcome, "reason": one.reason, "seconds": one.seconds} for one in report.results
    }


async def recorded(server: Running, record: Path) -> None:
    """Write the server's greedy answers."""
    client = Client(server.url, model="demo", reference=Client(server.url, model="demo"), record=record)
    try:
        await run_checks(client, chosen((), ["answers.reference"]), record.parent)
    finally:
        await client.close()


def run(names: Sequence[str], peers: Peers) -> int:
    """Verify the servers of these names; the results of others stay in the file."""
    found = json.loads(RESULT.read_text())["servers"] if RESULT.exists() else {}
    scratch = Path(tempfile.mkdtemp(prefix="epd-serve-field-"))
    records = {name: scratch / f"{name.replace(' ', '-')}.json" for name in ("vLLM alone", "native")}

    def start(name: str, logs: Path) -> Any:
        logs.mkdir(parents=True)
        made = SERVERS[name]
        return ours(made[0], made[1], peers, logs) if isinstance(made, tuple) else made(peers, logs)

    if "vLLM alone" in names:
        with start("epd-serve, native, EPD", scratch / "reference-native") as server:
            asyncio.run(recorded(server, records["native"]))
    with start("vLLM alone", scratch / "reference") as server:
        asyncio.run(recorded(server, records["vLLM alone"]))
    for number, name in enumerate(names):
        record = records["native" if name == "vLLM alone" else "vLLM alone"]
        logs = scratch / str(number)
        print(f"== {name}", flush=True)
        with start(name, logs) as server:
            report = asyncio.run(verified(server, record, logs))
        found[name] = {**found.get(name, {}), **kept(report)}
        versions = {"epd-serve": version("epd-serve"), "vllm": _version(peers.python, "vllm")}
        heading = {"command": COMMAND, "machine": machine(), "versions": versions}
        write(RESULT, {**heading, "servers": found})
    return 0


def _version(python: str, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def tables() -> Iterator[str]:
    """Check × server; then what failed, and in which words."""
    servers: dict[str, Any] = json.loads(RESULT.read_text())["servers"]
    names = {name: f"{number}" for number, name in enumerate(servers, start=1)}
    checks = [check for check in CHECKS if any(check in one for one in servers.values())]
    for name, number in names.items():
        counts = Counter(servers[name][check]["outcome"] for check in checks if check in servers[name])
        yield f"{number}. {name}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in _MARKS)}"
    yield ""
    yield f"| check | {' | '.join(names.values())} |"
    yield f"|---|{'---|' * len(names)}"
    for check in checks:
        results = [one.get(check) for one in servers.values()]
        if any(one and one["outcome"] != "skipped" for one in results):
            yield f"| {check} | {' | '.join(_MARKS[one['outcome']] if one else '' for one in results)} |"
    yield ""
    yield "| server | check | what was wrong |"
    yield "|---|---|---|"
    for name, one in servers.items():
        for check in checks:
            if check in one and one[check]["outcome"] == "fail":
                reason = " ".join(one[check]["reason"].replace("|", "/")[:160].split())
                yield f"| {names[name]} | {check} | {reason} |"


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--vllm-python", help="of an environment that has vLLM")
    parser.add_argument("--proxy", type=Path, help="vLLM's examples/.../disagg_epd_proxy.py")
    parser.add_argument("--router", help="the program vllm-router")
    parser.add_argument("--sglang-router", help="the program sglang-router")
    parser.add_argument("--only", action="append", choices=list(SERVERS))
    arguments = parser.parse_args()
    if arguments.tables:
        print(*tables(), sep="\n")
        return 0
    if arguments.vllm_python is None:
        parser.error("--vllm-python is missing")
    peers = Peers(
        python=arguments.vllm_python,
        proxy=arguments.proxy,
        router=arguments.router,
        sglang_router=arguments.sglang_router,
    )
    return run(arguments.only or list(SERVERS), peers)


if __name__ == "__main__":
    sys.exit(main())
