"""Deployments of vLLM on a CPU beside plain vLLM: their answers, what cancelled requests leave, and CPU time.

The built-in model in float32. 24 requests (words and pictures, greedy and sampled with seeds, log-probabilities,
stop strings, structured output) are asked whole and streamed, 4 and 24 at a time, beginning with the first that
the deployment gets; an answer other than that of a vLLM alone counts as a mismatch. Then storms of 100 streams
that are cancelled at random moments, and how long after each an instance has a request or a block. Then nothing
for a while. Then bursts of pictures, all at once, and kills of an instance of each role with streams under way.

A vLLM without the hooks of epd-serve's connectors runs with its own: ECExampleConnector and Mooncake. What a vLLM
alone answers in several ways is not compared: 0.27.1 draws other numbers for a seed beside other requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import CHAT_PATH, RESULTS, argument_parser, data_url, greedy_chat, machine, noise, write
from benchmarks.deployed import figures
from epd_serve.config import DEMO_MODEL, DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.vllm.installed import find_vllm

TOPOLOGIES = ("EPD", "E-P-D", "E-PD", "EP-D")
PASSES = [(stream, concurrency) for concurrency in (4, 24) for stream in (False, True)]
COMMAND = "python -m benchmarks.vllm_soundness --vllm-python PYTHON"
MODEL = "benchmark"
STORMS, STORM_SIZE, IDLE_S = 10, 100, 60.0
BURSTS = (200, 500)
#: Of a burst's answers so many are asked again, one at a time.
CHECKED = 20
#: Streams under way when an instance is killed, seconds after they began, and seconds for it to come back.
NUM_STREAMS, KILL_AFTER_S, BACK_S = 12, 1.0, 1800.0
INSTANCES: dict[str, Any] = {
    "base_port": 0,
    "threads": 1,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "engine_args": {"enforce_eager": True, "chat_template_content_format": "openai"},
}
SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}

#: An answer: its text, and its tokens with their log-probabilities where they were asked for.
Answer = tuple[str, list[tuple[str, float]]]
#: The answers of a vLLM alone, each with its choices; None where it gives now this one, now another.
Expected = list[list[Answer] | None]


def chat(text: str, *pictures: str, **fields: Any) -> dict[str, Any]:
    return {**greedy_chat(text, pictures, max_tokens=12), **fields}


def questions() -> list[dict[str, Any]]:
    """24."""
    sizes = [(160, 192), (192, 160), (224, 128), (160, 160)]
    seen = [data_url(noise(seed, *size)) for seed, size in enumerate(sizes)]
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    structured: dict[str, Any] = {"ignore_eos": False, "max_tokens": 40, "response_format": form}
    asked = [chat(f"What is picture {number}?", one) for number, one in enumerate(seen)]
    asked += [chat("Compare them.", seen[0], seen[1]), chat("Compare them.", seen[1], seen[0])]
    asked += [chat("Say it.", one, logprobs=True, top_logprobs=2) for one in seen[:2]]
    asked += [chat("Say it.", one, seed=number, **drawn) for number, one in enumerate(seen[2:])]
    asked += [chat("Describe it.", seen[3], **structured), chat("What color is the sky?", **structured)]
    asked += [chat(f"Count to {number}. " * number) for number in (3, 11, 29)]
    asked += [chat(f"Say apple {number}", logprobs=True) for number in range(3)]
    asked += [chat(f"Tell me {number}", seed=number, logprobs=True, **drawn) for number in range(3)]
    asked += [
        chat("Repeat: apple banana", stop=["an"]),
        chat("Hello", max_tokens=60),
        chat("What is 2 + 3?", n=2, seed=9, **drawn),
    ]
    assert len(asked) == 24
    return asked


async def ask(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], *, stream: bool) -> list[Answer]:
    """The answer's choices. Raises RuntimeError for an error."""
    path = f"{url}{CHAT_PATH}"
    whole: dict[int, Answer] = {}
    if not stream:
        answer = await client.post(path, json={**body, "model": MODEL})
        if answer.status_code != 200:
            raise RuntimeError(answer.text[:300])
        for choice in answer.json()["choices"]:
            whole[choice["index"]] = (choice["message"]["content"] or "", tokens_of(choice))
    else:
        async with client.stream("POST", path, json={**body, "model": MODEL, "stream": True}) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread())[:300])
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    text, tokens = whole.get(choice["index"], ("", []))
                    text += choice["delta"].get("content") or ""
                    whole[choice["index"]] = (text, tokens + tokens_of(choice))
    return [whole[index] for index in sorted(whole)]


def tokens_of(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(one["token"], one["logprob"]) for one in (choice.get("logprobs") or {}).get("content") or ()]


def same(left: list[Answer] | BaseException, right: list[Answer] | BaseException) -> bool | None:
    """The same tokens, and log-probabilities that differ by rounding alone; None where one is an error."""
    if isinstance(left, BaseException) or isinstance(right, BaseException):
        return None
    return len(left) == len(right) and all(
        a == b
        and [token for token, _ in tokens] == [token for token, _ in others]
        and all(abs(one - other) < 0.01 for (_, one), (_, other) in zip(tokens, others, strict=True))
        for (a, tokens), (b, others) in zip(left, right, strict=True)
    )


async def ask_all(
    url: str, bodies: list[dict[str, Any]], *, stream: bool, concurrency: int
) -> list[list[Answer] | Exception]:
    turns = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def one(body: dict[str, Any]) -> list[Answer]:
            async with turns:
                return await ask(client, url, body, stream=stream)

        return await asyncio.gather(*map(one, bodies), return_exceptions=True)  # type: ignore[return-value]


def processes(deployment: LocalDeployment) -> dict[str, list[psutil.Process]]:
    """Figures of each instance, and of the gateway."""
    found = {}
    for process in deployment.processes:
        root = psutil.Process(process.pid)
        found[process.spec.name] = [root, *root.children(recursive=True)]
    return found


def cpu_s(running: Mapping[str, list[psutil.Process]]) -> dict[str, float]:
    return {name: sum(sum(one.cpu_times()[:2]) for one in ones) for name, ones in running.items()}


async def storm(deployment: LocalDeployment, bodies: list[dict[str, Any]], seed: int) -> float:
    """Seconds from the last cancellation until no instance has a request or a block of one."""
    chooser = random.Random(seed)

    async def leave_early(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(chooser.uniform(0.0, 1.0)):
                await ask(client, deployment.gateway_url, {**body, "max_tokens": 400}, stream=True)
        except TimeoutError:
            pass

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(leave_early(client, chooser.choice(bodies)) for _ in range(STORM_SIZE)))
        ended = time.monotonic()
    busy = set(deployment.instances)
    while busy:
        for name in list(busy):
            now = await figures(deployment, name)
            keys = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            if not any(now[f"vllm:{key}"] for key in keys):
                busy.discard(name)
        if time.monotonic() - ended > 120:
            raise RuntimeError(f"not idle after 120 s: {busy}")
    return time.monotonic() - ended


async def burst(url: str, size: int) -> dict[str, Any]:
    """As many requests at once, each with a picture of its own. What is refused clearly is not lost."""
    bodies = [chat("Describe it.", data_url(noise(size + seed, 96, 96))) for seed in range(size)]
    began = time.monotonic()
    answers = await ask_all(url, bodies, stream=False, concurrency=size)
    took_s = time.monotonic() - began
    errors = [str(one) for one in answers if isinstance(one, Exception)]
    again = await ask_all(url, bodies[:CHECKED], stream=False, concurrency=1)
    return {
        "size": size,
        "answered": size - len(errors),
        "refused": sum("overloaded" in one for one in errors),
        "lost": [one[:200] for one in errors if "overloaded" not in one],
        "wrong": [same(*pair) for pair in zip(answers, again, strict=False)].count(False),
        "took_s": round(took_s, 1),
    }


async def kill(deployment: LocalDeployment, name: str) -> dict[str, Any]:
    """Kill an instance under streams; what their clients see, and seconds until it serves again."""
    url = deployment.gateway_url
    bodies = [
        chat("Describe it.", data_url(noise(9000 + seed, 96, 96)), max_tokens=300, ignore_eos=True)
        for seed in range(NUM_STREAMS)
    ]
    expected = await ask_all(url, bodies, stream=True, concurrency=NUM_STREAMS)
    [killed] = [one for one in deployment.processes if one.spec.name == name]
    root = psutil.Process(killed.pid)
    victims = [root, *root.children(recursive=True)]
    ended_s: list[float] = []

    async def watched(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Answer] | Exception:
        try:
            return await ask(client, url, body, stream=True)
        except (RuntimeError, httpx.HTTPError) as error:
            return error
        finally:
            ended_s.append(time.monotonic())

    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        under_way = [asyncio.create_task(watched(client, body)) for body in bodies]
        await asyncio.sleep(KILL_AFTER_S)
        at_s, num_ended = time.monotonic(), len(ended_s)
        for one in victims:
            one.kill()
        answers = await asyncio.gather(*under_way)
        failed = [str(one)[:200] for one in answers if isinstance(one, Exception)]
        for wanted in (False, True):
            while (await client.get(f"{url}/health")).json()["instances"][name]["ready"] is not wanted:
                assert time.monotonic() - at_s < BACK_S, f"{name} has not come back"
                await asyncio.sleep(0.2)
        back_s = time.monotonic() - at_s
    again = await ask_all(url, bodies, stream=True, concurrency=NUM_STREAMS)
    judged = [same(*pair) for pair in zip(answers, expected, strict=True)]
    return {
        "instance": name,
        "ended_before": num_ended,
        "right": judged.count(True),
        "wrong": judged.count(False),
        "failed": failed,
        "last_end_after_s": round(max(ended_s) - at_s, 2),
        "back_after_s": round(back_s, 1),
        "failed_afterwards": [str(one)[:200] for one in again if isinstance(one, Exception)],
    }


async def measure(
    topology: str,
    python: str,
    bodies: list[dict[str, Any]],
    expected: Expected | None,
    keep: Callable[[dict[str, Any], Expected], None],
) -> Expected:
    """``expected`` are the answers of a vLLM alone, which are returned; None: this one's instance gives them.

    ``keep`` is called with what is measured so far, after each part.
    """
    start = time.monotonic()
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
        row: dict[str, Any] = {"topology": topology, "ready_s": round(time.monotonic() - start, 1), "passes": []}
        running = processes(deployment)
        before, num_asked = cpu_s(running), 0
        given: list[list[list[Answer] | Exception]] = []
        for stream, concurrency in PASSES:
            began = time.monotonic()
            given.append(await ask_all(deployment.gateway_url, bodies, stream=stream, concurrency=concurrency))
            row["passes"].append(
                {"stream": stream, "concurrency": concurrency, "took_s": round(time.monotonic() - began, 2)}
            )
            num_asked += len(bodies)
        spent = cpu_s(running)
        row["cpu_s_per_request"] = {name: round((spent[name] - before[name]) / num_asked, 3) for name in spent}
        if expected is None:
            [instance] = deployment.instances.values()
            alone = await ask_all(instance.url, bodies, stream=False, concurrency=1)
            expected = [one for one in alone if not isinstance(one, Exception)]
            assert len(expected) == len(bodies), [one for one in alone if isinstance(one, Exception)]
            first = cpu_s(running)
            for stream, concurrency in PASSES:
                again = await ask_all(instance.url, bodies, stream=stream, concurrency=concurrency)
                expected = [
                    one if one and same(one, other) else None for one, other in zip(expected, again, strict=True)
                ]
            name = instance.name
            row["not_compared"] = [number for number, one in enumerate(expected) if one is None]
            row["plain_cpu_s_per_request"] = round((cpu_s(running)[name] - first[name]) / num_asked, 3)
        for told, answers in zip(row["passes"], given, strict=True):
            told["errors"] = [repr(one)[:200] for one in answers if isinstance(one, Exception)]
            told["mismatches"] = [
                [number, wanted, one]
                for number, (one, wanted) in enumerate(zip(answers, expected, strict=True))
                if wanted is not None and same(one, wanted) is False
            ]
        keep(row, expected)
        row["storms_idle_after_s"] = [round(await storm(deployment, bodies, seed), 2) for seed in range(STORMS)]
        await asyncio.sleep(5)
        before, began = cpu_s(running), time.monotonic()
        await asyncio.sleep(IDLE_S)
        lasted = time.monotonic() - began
        row["idle_percent_of_a_core"] = {
            name: round(100 * (spent - before[name]) / lasted, 2) for name, spent in cpu_s(running).items()
        }
        row["memory_gb"] = {
            name: round(sum(one.memory_full_info().pss for one in ones) / 1e9, 2) for name, ones in running.items()
        }
        keep(row, expected)
        for size in BURSTS:
            row.setdefault("bursts", []).append(await burst(deployment.gateway_url, size))
            keep(row, expected)
        for name in deployment.instances:
            if name[:-1] in ("e", "p", "d"):
                row.setdefault("kills", []).append(await kill(deployment, name))
                keep(row, expected)
    row["took_s"] = round(time.monotonic() - start)
    keep(row, expected)
    return expected


def summary(row: dict[str, Any]) -> str:
    wrong = sum(len(one["mismatches"]) for one in row["passes"])
    failed = sum(len(one["errors"]) for one in row["passes"])
    return (
        f"{row['topology']:6} mismatches {wrong}, errors {failed}, "
        f"{ {key: value for key, value in row.items() if key not in ('topology', 'passes')} }"
    )


async def run(arguments: argparse.Namespace) -> None:
    """Writes the results after each part; with answers of an earlier run, beside the rows that are there."""
    bodies, results, answers = questions(), RESULTS / "vllm-soundness-cpu.json", arguments.answers
    rows: dict[str, dict[str, Any]] = {}
    expected: Expected | None = None
    topologies = arguments.topologies
    if answers is not None and answers.exists():
        expected = json.loads(answers.read_text())
        if results.exists():
            rows = {row["topology"]: row for row in json.loads(results.read_text())["rows"]}
    else:
        topologies = dict.fromkeys(("EPD", *topologies))  # the first says what is right

    def keep(row: dict[str, Any], expected: Expected) -> None:
        rows[row["topology"]] = row
        if answers is not None:
            answers.write_text(json.dumps(expected))
        report = {
            "command": COMMAND + (" --answers FILE --topologies T, for each" if answers is not None else ""),
            "machine": machine(),
            "vllm": find_vllm(arguments.vllm_python).vllm,
            "took_s": sum(one.get("took_s", 0) for one in rows.values()),
            "rows": sorted(rows.values(), key=lambda one: TOPOLOGIES.index(one["topology"])),
        }
        write(results, report)

    for topology in topologies:
        expected = await measure(topology, arguments.vllm_python, bodies, expected, keep)
        print(summary(rows[topology]), flush=True)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of the environment that has vLLM for CPUs")
    parser.add_argument("--topologies", nargs="*", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument(
        "--answers", type=Path, help="keeps the answers of vLLM alone, so that topologies can be run one at a time"
    )
    arguments = parser.parse_args()
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
