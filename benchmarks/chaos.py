"""Mixed requests under random SIGKILLs of E, P, D and the store's master, which are started again each time.

With ``--hangs`` some of them are stopped (SIGSTOP) instead, which the supervisor must notice.

Every answer is compared with the one that the same deployment gave before the first fault (greedy, float32). In
the end no instance and no gateway may hold anything. Run as ``python -m benchmarks.chaos [--requests 1000]`` from
the root of the repository; the exit code is 1 where an answer was wrong, a request hung or something leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
from PIL import Image
from rich.console import Console

from benchmarks.common import RESULTS, data_url, encoded, machine, typed, write
from epd_serve.config import DEMO_MODEL, DeploymentConfig
from epd_serve.launch import Backoff, LocalDeployment, ProcessState
from epd_serve.types import KVMode

#: Statuses of a clear error that a fault may lead to.
_FAULT_STATUSES = (429, 500, 502, 503, 504)
_NUM_PICTURES = 24
_QUESTIONS = (
    "What color is the circle?",
    "What is in the picture?",
    "How many shapes are there?",
    "Where is the blue square?",
)
_TEXTS = ("What is the capital of France?", "Count to 9.", "What is 2 + 3?", "Repeat: apple banana cherry")


class Outcome(StrEnum):
    IDENTICAL = "identical"
    ERROR = "clear error"
    CANCELLED = "cancelled by the client"
    WRONG = "wrong"
    HANG = "hang"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. Equal ``key``, equal answer.

    ``patience_s``: the client leaves after so long; None: it waits for the answer.
    """

    key: str
    body: dict[str, Any]
    patience_s: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """``detail``: what was wrong, or the status of a clear error; ``seconds``: until that was known."""

    outcome: Outcome
    text: str = ""
    detail: str = ""
    seconds: float = 0.0


def make_requests(count: int, seed: int) -> list[Request]:
    """Texts, pictures (few enough that most are asked about again), two pictures, streams, impatient clients."""
    rng = random.Random(seed)
    return [_make_request(rng) for _ in range(count)]


def make_streams(count: int, seed: int) -> list[Request]:
    """Streams of patient clients, long enough that a fault meets many in their middle."""
    rng = random.Random(seed)
    streams = []
    for request in make_requests(count, seed):
        body = request.body | {"stream": True, "max_tokens": rng.choice((48, 120, 250))}
        key = json.dumps(body)
        streams.append(Request(key=blake2b(key.encode(), digest_size=8).hexdigest(), body=body, patience_s=None))
    return streams


def _make_request(rng: random.Random) -> Request:
    pictures = [rng.randrange(_NUM_PICTURES) for _ in range(rng.choice((0, 0, 1, 1, 1, 2)))]
    text = rng.choice(_QUESTIONS if pictures else _TEXTS) + " apple" * rng.choice((0, 0, 20, 120))
    max_tokens = rng.choice((1, 16, 96, 250))
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _picture(one)}} for one in pictures]
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": rng.random() < 0.5,
    }
    impatient = rng.random() < 0.15
    return Request(
        key=f"{pictures} {max_tokens} {text}", body=body, patience_s=rng.uniform(0, 1.5) if impatient else None
    )


def _picture(number: int) -> str:
    """A data URL: coloured rectangles under noise, of one of three sizes."""
    rng = np.random.default_rng(number)
    width, height = ((120, 90), (200, 150), (90, 240))[number % 3]
    pixels = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
    for _ in range(3):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        pixels[y : y + 50, x : x + 50] += rng.integers(0, 190, 3, dtype=np.uint8)
    return data_url(encoded(Image.fromarray(pixels)))


async def ask(client: httpx.AsyncClient, request: Request, expected: str | None, deadline_s: float) -> Result:
    """Ask and judge. Without ``expected`` any complete answer counts as identical.

    Before the deadline there must be the whole answer or an error that says what happened; a stream that breaks
    off must say so too, and what came before must be the beginning of the right answer.
    """
    started = time.monotonic()
    result = await _ask(client, request, expected, deadline_s)
    return replace(result, seconds=time.monotonic() - started)


async def _ask(client: httpx.AsyncClient, request: Request, expected: str | None, deadline_s: float) -> Result:
    limit_s = deadline_s if request.patience_s is None else request.patience_s
    try:
        async with asyncio.timeout(limit_s):
            if request.body["stream"]:
                return await _stream(client, request, expected)
            return await _whole(client, request, expected)
    except TimeoutError:
        if request.patience_s is not None:
            return Result(outcome=Outcome.CANCELLED)
        return Result(outcome=Outcome.HANG, detail=f"no answer in {deadline_s:g} s")
    except httpx.TransportError as error:
        return Result(outcome=Outcome.WRONG, detail=f"the gateway broke off without a word: {error!r}")


async def _whole(client: httpx.AsyncClient, request: Request, expected: str | None) -> Result:
    answer = await client.post("/v1/chat/completions", json=request.body)
    if answer.status_code != 200:
        return _judge_error(answer.status_code, answer.text)
    choice = answer.json()["choices"][0]
    return _judge(f"{choice['message']['content']} [{choice['finish_reason']}]", expected)


async def _stream(client: httpx.AsyncClient, request: Request, expected: str | None) -> Result:
    text, finish, events = "", "", ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=request.body) as answer:
            if answer.status_code != 200:
                return _judge_error(answer.status_code, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                events = line or events
                if line.startswith("data: {") and "error" not in (event := json.loads(line[6:])):
                    choice = event["choices"][0]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    except httpx.RemoteProtocolError:
        if not events.startswith('data: {"error"'):
            return Result(outcome=Outcome.WRONG, text=text, detail="a stream was cut without a word")
        if expected is not None and not expected.startswith(text):
            return Result(outcome=Outcome.WRONG, text=text, detail="a broken stream began wrongly")
        return Result(outcome=Outcome.ERROR, text=text, detail="stream broken off")
    if events != "data: [DONE]":
        return Result(outcome=Outcome.WRONG, text=text, detail="a stream ended in order and is not complete")
    return _judge(f"{text} [{finish}]", expected)


def _judge(text: str, expected: str | None) -> Result:
    if expected is None or text == expected:
        return Result(outcome=Outcome.IDENTICAL, text=text)
    return Result(outcome=Outcome.WRONG, text=text, detail=f"expected {expected!r}")


def _judge_error(status: int, body: str) -> Result:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    if status in _FAULT_STATUSES and message:
        return Result(outcome=Outcome.ERROR, text=message, detail=str(status))
    return Result(outcome=Outcome.WRONG, detail=f"status {status}: {body[:200]}")


LEASE_S = 3.0
DEADLINE_S = 60.0
HANG_TIMEOUT_S = 9.0
#: A client that was told that there is no instance comes back after this, as the gateway asks it to.
PAUSE_S = 2.0
_BAD = (Outcome.WRONG, Outcome.HANG)


@dataclass
class Chaos:
    """One run.

    Attributes:
        results: of the requests asked under faults.
        hang_share: of the faults, those that stop a process (SIGSTOP) and leave killing it to the supervisor.
        num_spared: processes of a kind that must be ready beside one that is killed.
        answers_between: answers that must come between two faults, so that a slow machine is not killed faster.
        kills: by name of the process, of either kind.
        hangs: those of the other kind.
        leaks: what was still held in the end.
    """

    deployment: LocalDeployment
    client: httpx.AsyncClient
    rng: random.Random
    interval_s: float
    hang_share: float = 0.0
    num_spared: int = 0
    answers_between: int = 0
    expected: dict[str, str] = field(default_factory=dict)
    results: list[tuple[Request, Result]] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    hangs: Counter[str] = field(default_factory=Counter)
    leaks: list[str] = field(default_factory=list)

    async def learn(self, requests: list[Request], concurrency: int) -> None:
        """The answer to each distinct request without any fault."""
        distinct = {request.key: request for request in requests}

        async def one(request: Request) -> None:
            patient = Request(key=request.key, body=request.body, patience_s=None)
            result = await ask(self.client, patient, None, DEADLINE_S)
            if result.outcome is not Outcome.IDENTICAL:
                raise RuntimeError(f"{request.key} failed without any fault: {result}")
            self.expected[request.key] = result.text

        await _in_parallel([one(request) for request in distinct.values()], concurrency)

    async def run(self, requests: list[Request], concurrency: int) -> None:
        """Ask all requests while processes are killed; again, until at least one of each kind was."""
        kinds = {kind_of(process.spec.name) for process in self.deployment.processes} - {"gateway"}
        killing = asyncio.create_task(self._kill())
        try:
            while not kinds <= {kind_of(name) for name in self.kills}:
                await self.ask_all(requests, concurrency)
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)

    async def ask_all(self, requests: list[Request], concurrency: int) -> None:
        """Ask all requests."""

        async def one(request: Request) -> None:
            result = await ask(self.client, request, self.expected[request.key], DEADLINE_S)
            self.results.append((request, result))
            if result.outcome is Outcome.ERROR:
                await asyncio.sleep(PAUSE_S)

        await _in_parallel([one(request) for request in requests], concurrency)

    async def _kill(self) -> None:
        """Each kind of process in its turn, so that a short run kills some of each too."""
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
                hangs = self.rng.random() < self.hang_share
                with suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGSTOP if hangs else signal.SIGKILL)
                    struck.add(victim.pid)
                    self.kills[victim.spec.name] += 1
                    if hangs:
                        self.hangs[victim.spec.name] += 1

    async def settle(self) -> None:
        """Wait until all have started again, and until nothing is held; what stays held is a leak."""
        deadline = time.monotonic() + 4 * LEASE_S + HANG_TIMEOUT_S + 15
        while True:
            await self.deployment.wait_ready()
            self.leaks = await self._held()
            if not self.leaks or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.2)

    async def _held(self) -> list[str]:
        held = []
        if sum(process.num_restarts for process in self.deployment.processes) < self.kills.total():
            held.append("a process that was killed or stopped has not been started again")
        for name, handle in self.deployment.instances.items():
            try:
                answer = await self.client.get(f"{handle.url}/integrity", timeout=HANG_TIMEOUT_S)
            except httpx.TransportError as error:  # killed or stopped a moment ago
                held.append(f"{name}: {error!r}")
                continue
            if answer.status_code != 200 or any(answer.json().values()):
                held.append(f"{name}: {answer.text}")
        exposition = (await self.client.get("/metrics")).text
        held += re.findall(r"^epd_serve_in_flight_calls\{.*\} (?!0\.0).*$", exposition, re.MULTILINE)
        return held

    def report(self) -> dict[str, Any]:
        outcomes = Counter(result.outcome for _, result in self.results)
        errors = Counter(result.detail for _, result in self.results if result.outcome is Outcome.ERROR)
        return {
            "requests": len(self.results),
            "distinct": len(self.expected),
            "outcomes": {outcome.value: outcomes[outcome] for outcome in Outcome},
            "clear_errors": dict(sorted(errors.items())),
            "kills": dict(sorted(self.kills.items())),
            "hangs": dict(sorted(self.hangs.items())),
            "restarts": {one.spec.name: one.num_restarts for one in self.deployment.processes},
            "leaks": self.leaks,
            "faults": [
                {"key": asked.key, "stream": asked.body["stream"], "text": result.text, "detail": result.detail}
                for asked, result in self.results
                if result.outcome in _BAD
            ],
        }


def kind_of(name: str) -> str:
    """e0 → e."""
    return name.rstrip("0123456789")


async def _in_parallel(work: list[Any], concurrency: int) -> None:
    slots = asyncio.Semaphore(concurrency)

    async def one(task: Any) -> None:
        async with slots:
            await task

    await asyncio.gather(*(one(task) for task in work))


def deployment_config(arguments: argparse.Namespace, **gateway: Any) -> DeploymentConfig:
    return DeploymentConfig(
        topology=arguments.topology,
        model=getattr(arguments, "model", DEMO_MODEL),
        hang_timeout_s=HANG_TIMEOUT_S,
        gateway={"port": 0, "request_timeout_s": DEADLINE_S * 0.75, **gateway},
        feature_store=arguments.store,
        instances={
            "base_port": 0,
            "threads": 1,
            "lease_s": LEASE_S,
            "feature_timeout_s": 12,
            # few blocks and small caches, so that requests wait for each other at every stage
            "num_blocks": 120,
            "max_num_batched_tokens": 64,
            "feature_store_bytes": 1 << (20 if arguments.store == "embedded" else 24),  # its least
            "feature_cache_bytes": 1 << 19,
            "kv_transfer": {"transport": arguments.transport, "mode": arguments.mode},
        },
    )


@asynccontextmanager
async def started(arguments: argparse.Namespace, config: DeploymentConfig, log_dir: Path) -> AsyncIterator[Chaos]:
    """The deployment, whose processes are started again at once, and a client of its gateway."""
    async with (
        LocalDeployment(
            config,
            log_dir=log_dir,
            ready_timeout_s=180,
            backoff=lambda: Backoff(first_s=0.2, limit_s=0.2),  # many deaths are wanted here
        ) as deployment,
        httpx.AsyncClient(base_url=deployment.gateway_url, timeout=None, limits=httpx.Limits()) as client,
    ):
        yield Chaos(deployment, client, random.Random(arguments.seed), arguments.interval, arguments.hangs)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    requests = make_requests(arguments.requests, arguments.seed)
    log_dir = Path(tempfile.mkdtemp(prefix="epd-serve-chaos-"))
    async with started(arguments, deployment_config(arguments), log_dir) as chaos:
        await chaos.learn(requests, arguments.concurrency)
        began = time.monotonic()
        await chaos.run(requests, arguments.concurrency)
        seconds = time.monotonic() - began
        await chaos.settle()
        return {
            **heading("chaos", arguments, seconds, "topology", "store", "transport", "mode"),
            "interval_s": arguments.interval,
            **(report := chaos.report()),
            "passed": not report["leaks"] and not any(report["outcomes"][outcome.value] for outcome in _BAD),
            "logs": str(log_dir),
        }


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
    parser.add_argument("--hangs", type=float, default=0.0, help="share of the faults that are SIGSTOPs")
    parser.add_argument("--topology", default="2E-2P-2D")
    parser.add_argument("--store", choices=("embedded", "mooncake"), default="embedded")
    parser.add_argument("--transport", choices=("auto", "tcp", "mooncake"), default="auto")
    parser.add_argument("--mode", choices=get_args(KVMode), default="grouped")
    return parser


def main() -> int:
    parser = new_parser(__doc__ or "", num_requests=1000)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/chaos-cpu[-mooncake].json")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    file = "chaos-cpu.json" if arguments.store == "embedded" else "chaos-cpu-mooncake.json"
    return publish(report, arguments.output or RESULTS / file)


if __name__ == "__main__":
    sys.exit(main())
