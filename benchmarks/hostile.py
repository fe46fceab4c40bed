"""One hostile request after another against a real deployment, while a healthy client goes on asking.

    python -m benchmarks.hostile --output benchmarks/results/hostile.json

For each body: the slowest answers of the healthy client before and meanwhile, and how much a process grew at most.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil

from benchmarks.common import argument_parser, machine, write
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_SHORT = '{"role":"user","content":"hi"}'
_DATA = "data:image/png;base64,"
_PIXEL = _DATA + "AAAA"
LIMIT = 64 * 1024 * 1024 - 1024


def _chat(**fields: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})


def _messages(message: str, number: int) -> str:
    return '{"messages":[' + ",".join([message] * number) + "]}"


def _schema(schema: Any) -> str:
    return _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, max_tokens=1
    )


def _tokens(token: str, number: int) -> str:
    return '{"prompt":[' + ",".join([token] * number) + '],"max_tokens":1}'


def _call(arguments: str) -> str:
    return json.dumps({"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}})


def _parts(part: str, number: int) -> str:
    return _messages('{"role":"user","content":[' + ",".join([part] * number) + "]}", 1)


def _picture(url: str, **fields: Any) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": parts}], **fields})


_PICTURE = json.dumps({"type": "image_url", "image_url": {"url": _PIXEL}})
_PART = '{"type":"text","text":"a"}'

#: Name → (path, status, the body's text).
HOSTILE: dict[str, tuple[str, int, Callable[[], str]]] = {
    "a million messages": (CHAT, 413, lambda: _messages(_SHORT, 1_000_000)),
    "100,000 messages": (CHAT, 413, lambda: _messages(_SHORT, 100_000)),
    "5,000 messages": (CHAT, 400, lambda: _messages(_SHORT, 5000)),
    "messages of nothing": (CHAT, 413, lambda: _messages("{}", 2_000_000)),
    "16,000 wrong messages": (CHAT, 400, lambda: _messages("{}", 16_000)),
    "100,000 pictures": (CHAT, 413, lambda: _messages(f'{{"role":"user","content":[{_PICTURE}]}}', 100_000)),
    "5,000 pictures": (CHAT, 400, lambda: _parts(_PICTURE, 5000)),
    "marks of payloads": (CHAT, 413, lambda: _chat(user=";base64,'" * 7_000_000)),
    "data URLs": (CHAT, 413, lambda: '{"user":[' + ",".join(['"data:"'] * 1_000_000) + "]}"),
    "10,000 parts": (CHAT, 413, lambda: _parts(_PART, 16_500)),
    "calls": (
        CHAT,
        400,
        lambda: _messages('{"role":"assistant","tool_calls":[' + ",".join([_call("{}")] * 5000) + "]}", 1),
    ),
    "an enum of 100,000": (CHAT, 400, lambda: _schema({"enum": [str(i) for i in range(100_000)]})),
    "an enum in a text": (
        CHAT,
        400,
        lambda: _chat(structured_outputs={"json": json.dumps({"enum": [str(i) for i in range(100_000)]})}),
    ),
    "lists in arguments": (
        CHAT,
        413,
        lambda: _messages(
            '{"role":"assistant","tool_calls":[' + _call('{"a":[' + "[]," * 1_000_000 + "[]]}") + "]}", 1
        ),
    ),
    "wrong tokens": (COMPLETION, 400, lambda: _tokens("-1", 262_000)),
    "ten million tokens": (COMPLETION, 413, lambda: _tokens("1", 10_000_000)),
    "prompts": (COMPLETION, 400, lambda: _tokens('"a"', 260_000)),
    "unknown fields": (CHAT, 413, lambda: _chat(**{f"u{i}": 1 for i in range(50_000)})),
    "few unknown fields": (CHAT, 400, lambda: _chat(**{f"u{i}": 1 for i in range(4000)})),
    "a field with a long name": (CHAT, 400, lambda: _chat(**{"temperatur" * 800_000: 1})),
    "a role with a long name": (CHAT, 400, lambda: _messages('{"role":"' + "user" * 2_000_000 + '"}', 1)),
    "biases": (CHAT, 413, lambda: _chat(logit_bias={str(i): 1000 for i in range(50_000)})),
    "input items": (RESPONSES, 413, lambda: '{"input":[' + ",".join([_SHORT] * 1_000_000) + "]}"),
    "5,000 input items": (RESPONSES, 400, lambda: '{"input":[' + ",".join([_SHORT] * 5000) + "]}"),
    "60 MiB of text": (CHAT, 413, lambda: _chat(user="a" * LIMIT)),
    "60 MiB of line breaks": (CHAT, 413, lambda: _chat(user="\n" * (LIMIT // 2))),
    "quotation marks": (CHAT, 413, lambda: '[{"a":' + '"' * (8 << 20)),
    "brackets": (CHAT, 413, lambda: "[" * LIMIT),
    "escapes": (CHAT, 413, lambda: '{"' + "\\" * ((8 << 20) - 10)),
    "texts to detokenize": ("/detokenize", 400, lambda: '{"tokens":[' + ",".join(["-1"] * 262_000) + "]}"),
    "messages to tokenize": ("/tokenize", 413, lambda: _messages(_SHORT, 1_000_000)),
    "a picture and a wrong field": (CHAT, 400, lambda: _picture(_DATA + "A" * (LIMIT - 2048), temprature=1)),
    "a picture that is none": (CHAT, 400, lambda: _picture(_DATA + "A" * (12 << 20) + "!")),
}

#: Bodies within all limits that are much work: an instance may refuse them for their length in tokens.
HEAVY: dict[str, tuple[str, int, Callable[[], str]]] = {
    "2,048 messages": (CHAT, 200, lambda: _messages(_SHORT, 2048)),
    "4,096 parts": (CHAT, 200, lambda: _parts(_PART, 4000)),
    "8 MiB of text": (CHAT, 200, lambda: _messages('{"role":"user","content":"' + "word, " * 1_390_000 + '"}', 1)),
    "8 MiB of letters": (
        CHAT,
        200,
        lambda: _messages('{"role":"user","content":"' + "a" * (8_380_000) + '"}', 1),
    ),
    "2 Mi escapes": (CHAT, 200, lambda: _messages('{"role":"user","content":"' + "\\n" * 2_000_000 + '"}', 1)),
    "260,000 tokens": (COMPLETION, 200, lambda: _tokens("1", 260_000)),
    "128 prompts": (
        COMPLETION,
        200,
        lambda: '{"prompt":[' + ",".join(['"' + "a" * 60_000 + '"'] * 128) + '],"max_tokens":1}',
    ),
}


#: Seconds for which the healthy client is watched before each body, and after its answer.
BEFORE_S, AFTER_S = 3.0, 1.0
_BODY = {"messages": [{"role": "user", "content": "What colours are there?"}], "max_tokens": 2, "temperature": 0}


def healthy_client(url: str, pipe: Connection) -> None:
    """Ask again and again, until told to stop; send the (end, milliseconds, status) of each answer when asked."""
    seen: list[tuple[float, float, int]] = []
    with httpx.Client(base_url=url, timeout=300) as client:
        while True:
            while pipe.poll():
                if pipe.recv() == "stop":
                    return
                pipe.send(seen)
                seen = []
            start_s = time.monotonic()
            try:
                status = client.post("/v1/chat/completions", json=_BODY).status_code
            except httpx.TransportError:  # the gateway is gone
                status = 0
                time.sleep(0.1)
            seen.append((time.monotonic(), 1e3 * (time.monotonic() - start_s), status))


def taken(pipe: Connection) -> list[tuple[float, float, int]]:
    pipe.send("give")
    answers: list[tuple[float, float, int]] = pipe.recv()
    return answers


def p99(milliseconds: list[float]) -> float:
    return round(sorted(milliseconds)[int(0.99 * (len(milliseconds) - 1))], 1) if milliseconds else 0.0


class Memory:
    """The largest resident memory of each process while it is watched."""

    def __init__(self) -> None:
        self.processes = psutil.Process().children(recursive=True)
        self.first = self._now()
        self.most = dict(self.first)

    def _now(self) -> dict[int, int]:
        return {process.pid: process.memory_info().rss for process in self.processes if process.is_running()}

    async def watch(self) -> None:
        while True:
            for pid, size in self._now().items():
                self.most[pid] = max(self.most[pid], size)
            await asyncio.sleep(0.02)

    def growth_mib(self) -> float:
        """Growth of the process that has grown most."""
        return round(max(self.most[pid] - size for pid, size in self.first.items()) / 2**20, 1)


async def attack(url: str, path: str, body: bytes, pipe: Connection) -> dict[str, Any]:
    await asyncio.to_thread(taken, pipe)
    await asyncio.sleep(BEFORE_S)
    before = await asyncio.to_thread(taken, pipe)
    memory = Memory()
    watching = asyncio.create_task(memory.watch())
    start_s = time.monotonic()
    try:
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url + path, data=body, headers={"content-type": "application/json"}) as answer,
        ):
            await answer.read()
            status: int | str = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        status = type(error).__name__
    seconds = time.monotonic() - start_s
    await asyncio.sleep(AFTER_S)
    during = await asyncio.to_thread(taken, pipe)
    watching.cancel()
    slow, slow_before = [ms for _, ms, _ in during], [ms for _, ms, _ in before]
    return {
        "status": status,
        "mb": round(len(body) / 1e6, 1),
        "seconds": round(seconds, 2),
        "before_p99_ms": p99(slow_before),
        "p99_ms": p99(slow),
        "slowest_ms": round(max(slow, default=0.0), 1),
        "failed": sum(status != 200 for _, _, status in during),
        "growth_mib": memory.growth_mib(),
        "lost": sum(not process.is_running() for process in memory.processes),
    }


async def run(names: list[str] | None) -> dict[str, Any]:
    config = DeploymentConfig(topology="E-P-D", gateway={"port": 0}, instances={"base_port": 0, "threads": 1})
    results: dict[str, Any] = {}
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        mine, theirs = multiprocessing.Pipe()
        client = multiprocessing.get_context("spawn").Process(
            target=healthy_client, args=(deployment.gateway_url, theirs), daemon=True
        )
        client.start()
        await asyncio.sleep(3)
        for name, (path, _, text) in {**HOSTILE, **HEAVY}.items():
            if names is None or name in names:
                results[name] = await attack(deployment.gateway_url, path, text().encode(), mine)
                print(f"{name:30s} {results[name]}", flush=True)
        mine.send("stop")
        await asyncio.to_thread(client.join)
    return {"command": "python -m benchmarks.hostile", "machine": machine(), "bodies": results}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--bodies", nargs="+", help="only these")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = asyncio.run(run(options.bodies))
    if options.output is not None:
        write(options.output, result)


if __name__ == "__main__":
    main()
