"""The host's part of a token's time: many streams from an emulated device whose own step is known.

All streams have the same prompt, which is computed once, and decode together. Over a window in which all of them
do, the time per token at the client stands beside the device's own step, and the CPU time that a step costs beside
the part that spends it: the engine's thread, the event loop of its process, its other threads, the gateway, and
the client of this benchmark. Where cores are fewer than these parts, they wait for each other, and the time per
token is that of the machine. The engine's thread also keeps the digests that stand for KV and tokens of a model
without weights, which a real one has not: with many streams that is most of its time.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.common import argument_parser, machine, typed, write
from benchmarks.deployed import figures, held_in
from epd_serve.config import DeploymentConfig
from epd_serve.cost.device_time import DeviceTime
from epd_serve.launch.deployment import LocalDeployment

_EVENT = b'data: {"'
_INSTANCE, _GATEWAY = "pd0", "gateway"


@dataclass
class Streams:
    """Requests that are answered token by token, read by one thread that looks at no token.

    Attributes:
        counts: events of each so far.
    """

    url: str
    body: bytes
    number: int
    counts: list[int] = field(default_factory=list)

    @contextmanager
    def opened(self) -> Iterator[None]:
        target = urlsplit(self.url)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {target.netloc}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(self.body)}\r\n\r\n".encode() + self.body
        self.counts = [0] * self.number
        self._selector = selectors.DefaultSelector()
        sockets = []
        try:
            for number in range(self.number):
                one = socket.create_connection((target.hostname or "127.0.0.1", target.port or 80))
                sockets.append(one)
                one.sendall(request)
                self._selector.register(one, selectors.EVENT_READ, number)
            yield
        finally:
            self._selector.close()
            for one in sockets:
                one.close()

    def read(self, until_s: float, least: int = sys.maxsize) -> None:
        """Read until a time, or until each stream has had so many events. Raises RuntimeError where one ends."""
        while time.monotonic() < until_s and min(self.counts) < least:
            for key, _ in self._selector.select(0.05):
                data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                if not data or (data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200")):
                    raise RuntimeError(
                        f"stream {key.data} ended after {self.counts[key.data]} events: {data[:500]!r}"
                    )
                self.counts[key.data] += data.count(_EVENT)


@dataclass(frozen=True)
class Moment:
    """What had been done by then: CPU seconds of each part, the engine's steps, the streams' events."""

    at_s: float
    cpu_s: Mapping[str, float]
    num_steps: float
    num_events: int


async def moment(deployment: LocalDeployment, streams: Streams) -> Moment:
    steps = await figures(deployment, _INSTANCE)
    return Moment(
        at_s=time.monotonic(),
        cpu_s=await asyncio.to_thread(cpu_seconds, {one.spec.name: one.pid for one in deployment.processes}),
        num_steps=steps["steps_total"],
        num_events=sum(streams.counts),
    )


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds by part. An instance's first thread runs the event loop, the busiest other one the engine."""
    threads = _threads(pids[_INSTANCE])
    loop_s = threads.pop(pids[_INSTANCE])
    engine_s = max(threads.values(), default=0.0)
    gateway = [pids[_GATEWAY], *(child.pid for child in psutil.Process(pids[_GATEWAY]).children(recursive=True))]
    return {
        "engine": engine_s,
        "event_loop": loop_s,
        "other_threads": sum(threads.values()) - engine_s,
        "gateway": sum(sum(_threads(pid).values()) for pid in gateway),
        "client": time.process_time(),
    }


def _threads(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


async def cell(deployment: LocalDeployment, options: Any, number: int, context: int) -> dict[str, Any]:
    """One number of streams at one length of their contexts."""
    url = deployment.gateway_url
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "prompt": prompt(context), "temperature": 0, "ignore_eos": True, "stream": True}
        (await client.post("/v1/completions", json={**body, "stream": False, "max_tokens": 1})).raise_for_status()
    time_of = DeviceTime.of(options.shape, options.device)
    step_s, _ = time_of.step(number, number, number * context, 0)
    # long enough for the window, however slow the host is, and short enough for the block tables to be alike
    max_tokens = int(2 * (options.seconds + options.settle) / step_s)
    streams = Streams(url, json.dumps({**body, "max_tokens": max_tokens}).encode(), number)
    with streams.opened():
        await asyncio.to_thread(streams.read, time.monotonic() + 300, 1)
        await asyncio.to_thread(streams.read, time.monotonic() + options.settle)
        before = await moment(deployment, streams)
        await asyncio.to_thread(streams.read, before.at_s + options.seconds)
        after = await moment(deployment, streams)
    seconds, steps = after.at_s - before.at_s, after.num_steps - before.num_steps
    events = after.num_events - before.num_events
    context_then = context + (before.num_events + after.num_events) // (2 * number)  # in the window's middle
    device_s, _ = time_of.step(number, number, number * context_then, 0)
    await _until_idle(deployment)
    return {
        "streams": number,
        "context": context,
        "device_step_ms": round(1e3 * device_s, 3),
        "engine_step_ms": round(1e3 * seconds / steps, 3),
        "tpot_ms": round(1e3 * seconds * number / events, 3),
        "steps": int(steps),
        "cpu_ms_per_step": {
            part: round(1e3 * (after.cpu_s[part] - before.cpu_s[part]) / steps, 3) for part in after.cpu_s
        },
    }


async def _until_idle(deployment: LocalDeployment) -> None:
    if held := await held_in(deployment):
        raise RuntimeError(f"the instance still holds {held}")


def prompt(num_tokens: int) -> list[int]:
    """Token ids; the first few hundred are words, whatever the model."""
    return [100 + place % 100 for place in range(num_tokens)]


async def measured(options: Any) -> list[dict[str, Any]]:
    config = DeploymentConfig(
        topology="PD",
        model={"shape_of": options.shape},
        devices=[f"emulated:{options.device}:0"],
        gateway={"port": 0},
        instances={
            "base_port": 0,
            "threads": 1,
            "max_num_seqs": max(options.streams),
            "max_num_batched_tokens": 8192,
        },
    )
    found = []
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        for context in options.contexts:
            for number in options.streams:
                found.append(await cell(deployment, options, number, context))
                print(line(found[-1]), flush=True)
    return found


def line(one: Mapping[str, Any]) -> str:
    cpu = one["cpu_ms_per_step"]
    parts = "".join(f"{cpu[part]:9.2f}" for part in ("engine", "event_loop", "other_threads", "gateway", "client"))
    return (
        f"{one['streams']:7} {one['context']:7} {one['device_step_ms']:9.2f} {one['engine_step_ms']:9.2f} "
        f"{one['tpot_ms']:9.2f} {one['tpot_ms'] - one['device_step_ms']:9.2f} {parts}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, "host-overhead.json")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--shape", default="qwen2.5-vl-7b")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="from the last stream's first token to the window"
    )
    options = parser.parse_args(argv)
    print(f"PD on emulated {options.device}, shape of {options.shape}; milliseconds, of CPU for each step")
    print("streams context    device    engine      TPOT      more    engine     loop    other  gateway   client")
    others = os.getloadavg()[0]
    cells = asyncio.run(measured(options))
    write(
        options.output,
        {
            "command": typed("host_overhead"),
            "machine": machine(),
            "devices": f"emulated {options.device}",
            "shape": options.shape,
            "note": "the cores are shared by engine, event loop, gateway and client, and by what ran beside them; "
            "the engine's time contains the digests of a model without weights",
            "load_average_before": round(others, 2),
            "cells": cells,
        },
    )


if __name__ == "__main__":
    main()
