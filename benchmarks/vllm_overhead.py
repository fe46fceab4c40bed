"""vLLM alone against epd-serve with vLLM inside, on the same cores: CPU seconds, first token, time per token.

The built-in model in float32. ``plain`` is ``vllm serve`` without anything of epd-serve in its process. Rounds of
24 streams, half of them with pictures that no round before had, 4 at a time. ``EPD`` is asked through its gateway
and directly, in turns, so that the difference is the gateway's and a busy machine does both the same harm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import CHAT_PATH, argument_parser, data_url, machine, noise, write
from benchmarks.common import RESULTS as FOLDER
from benchmarks.vllm_soundness import INSTANCES, MODEL, chat, cpu_s, processes
from epd_serve.backends.vllm_command import VllmOptions, command_of, environment_of
from epd_serve.config import DEMO_MODEL, DeploymentConfig, model_path
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import free_port
from epd_serve.launch.vllm.installed import find_vllm
from epd_serve.types import Role

TOPOLOGIES = ("EPD", "E-P-D", "EP-D")
NUM_REQUESTS, CONCURRENCY, MAX_TOKENS = 24, 4, 24
COMMAND = "python -m benchmarks.vllm_overhead --vllm-python PYTHON"

Cpu = Callable[[], dict[str, float]]


#: Pictures are squares of so many pixels a side, and every so many-th request has one of its own.
Pictures = tuple[int, int]


def bodies(round_number: int, pictures: Pictures) -> list[dict[str, Any]]:
    """Those of one round."""
    size, every = pictures
    first = round_number * NUM_REQUESTS
    texts = (f"Say what number {number} is." for number in range(first, first + NUM_REQUESTS))
    asked = [
        chat(
            text,
            *([data_url(noise(first + index, size, size))] if (index + 1) % every == 0 else []),
            max_tokens=MAX_TOKENS,
        )
        for index, text in enumerate(texts)
    ]
    return [{**one, "model": MODEL, "stream": True, "stream_options": {"include_usage": True}} for one in asked]


async def timed(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds until the first token, and for each of the others."""
    began, first, last, count = time.perf_counter(), 0.0, 0.0, 0
    async with client.stream("POST", f"{url}{CHAT_PATH}", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if any(choice["delta"].get("content") for choice in event["choices"]):
                last = time.perf_counter()
                first = first or last
            count = (event.get("usage") or {}).get("completion_tokens", count)
    assert count == MAX_TOKENS, count
    return first - began, (last - first) / (count - 1)


async def one_round(url: str, number: int, cpu: Cpu, pictures: Pictures) -> dict[str, Any]:
    before, turns, began = cpu(), asyncio.Semaphore(CONCURRENCY), time.perf_counter()
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

        async def ask(body: dict[str, Any]) -> tuple[float, float]:
            async with turns:
                return await timed(client, url, body)

        times = await asyncio.gather(*map(ask, bodies(number, pictures)))
    spent = cpu()
    return {
        "cpu_s": {name: spent[name] - before[name] for name in spent},
        "ttft_s": [ttft for ttft, _ in times],
        "tpot_s": [tpot for _, tpot in times],
        "took_s": time.perf_counter() - began,
    }


def summary(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all requests, and CPU seconds per request."""
    num_requests = NUM_REQUESTS * len(rounds)
    spent = {one: sum(r["cpu_s"][one] for r in rounds) / num_requests for one in rounds[0]["cpu_s"]}
    ttft, tpot = (sorted(one for r in rounds for one in r[key]) for key in ("ttft_s", "tpot_s"))
    return {
        "name": name,
        "requests": num_requests,
        "cpu_s_per_request": {one: round(seconds, 4) for one, seconds in spent.items()},
        "cpu_s_per_request_total": round(sum(spent.values()), 4),
        "ttft_ms": round(1000 * statistics.median(ttft), 1),
        "ttft_p90_ms": round(1000 * ttft[int(0.9 * len(ttft))], 1),
        "tpot_ms": round(1000 * statistics.median(tpot), 2),
        "requests_per_s": round(num_requests / sum(r["took_s"] for r in rounds), 2),
    }


@contextmanager
def plain(python: str, folder: Path) -> Iterator[tuple[str, Cpu]]:
    """``vllm serve`` with the same flags as an instance of ``EPD``."""
    options = VllmOptions(
        name="plain",
        role=Role.parse("EPD"),
        python=python,
        model=str(model_path(DEMO_MODEL)),
        served_model_name=MODEL,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        kind="cpu",
        dtype="float32",
        kv_bytes=1 << 30,
        threads=INSTANCES["threads"],
        arguments={key: INSTANCES[key] for key in ("max_model_len", "max_num_seqs")} | INSTANCES["engine_args"],
    )
    url = f"http://127.0.0.1:{options.port}"
    environment = {**os.environ, **environment_of(options), "PYTHONPATH": ""}
    del environment["EPD_SERVE_SPIN_S"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command_of(options), env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        root = psutil.Process(process.pid)
        running = {"plain": [root, *root.children(recursive=True)]}
        yield url, lambda: cpu_s(running)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def measure_plain(python: str, num_rounds: int, pictures: Pictures) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, plain(python, Path(folder)) as (url, cpu):
        await one_round(url, num_rounds, cpu, pictures)
        rounds = [await one_round(url, number, cpu, pictures) for number in range(num_rounds)]
        return [summary("plain", rounds)]


async def measure(topology: str, python: str, num_rounds: int, pictures: Pictures) -> list[dict[str, Any]]:
    config = DeploymentConfig(
        topology=topology,
        engine="vllm",
        model=DEMO_MODEL,
        served_model_name=MODEL,
        dtype="float32",
        gateway={"port": 0},
        instances=INSTANCES,
        vllm={"python": python},
    )
    async with LocalDeployment(config, ready_timeout_s=1200) as deployment:
        running = processes(deployment)

        def cpu() -> dict[str, float]:
            return cpu_s(running)

        ways = {topology: deployment.gateway_url}
        if topology == "EPD":
            [instance] = deployment.instances.values()
            ways["EPD without its gateway"] = instance.url
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for url in ways.values():
            await one_round(url, len(ways) * num_rounds, cpu, pictures)
        for number in range(num_rounds):
            for index, (name, url) in enumerate(sorted(ways.items(), reverse=bool(number % 2))):
                rounds[name].append(await one_round(url, len(ways) * number + index, cpu, pictures))
        return [summary(name, some) for name, some in rounds.items()]


async def run(arguments: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    python, num_rounds, pictures = arguments.vllm_python, arguments.rounds, (arguments.size, arguments.every)
    for name in ["plain", *arguments.topologies]:
        if name == "plain":
            found = await measure_plain(python, num_rounds, pictures)
        else:
            found = await measure(name, python, num_rounds, pictures)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
        report = {
            "command": " ".join([COMMAND, *arguments.told]),
            "machine": machine(),
            "vllm": find_vllm(arguments.vllm_python).vllm,
            "rows": rows,
        }
        write(FOLDER / arguments.results, report)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of the environment that has vLLM for CPUs")
    parser.add_argument("--topologies", nargs="*", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", default="vllm-overhead-cpu.json", help="file name in benchmarks/results")
    parser.add_argument("--size", type=int, default=160, help="of pictures, in pixels a side")
    parser.add_argument("--every", type=int, default=2, help="of so many requests one has a picture")
    arguments = parser.parse_args()
    given = {"topologies": "*", "rounds": None, "size": None, "every": None}
    arguments.told = [
        f"--{name} {' '.join(map(str, value)) if kind else value}"
        for name, kind in given.items()
        if (value := getattr(arguments, name)) != parser.get_default(name)
    ]
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
