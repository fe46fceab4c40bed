"""A modest client beside one that takes all it can get: its waits and refusals, alone and meanwhile.

    python -m benchmarks.hostile_neighbours --output benchmarks/results/hostile-neighbours.json

Each attack goes on for ``--seconds``; the modest client sends a short request, then the next.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common import argument_parser, machine, write
from benchmarks.hostile import p99
from epd_serve.config import DeploymentConfig
from epd_serve.config.keys import hash_key
from epd_serve.launch.deployment import LocalDeployment

_QUESTION = [{"role": "user", "content": "What colours are there?"}]
_MODEST = {"messages": _QUESTION, "max_tokens": 8, "temperature": 0}
_LONG = {"messages": _QUESTION, "max_tokens": 1500, "ignore_eos": True}

#: Name → (API keys or none, what the greedy client sends, how many of it at once).
ATTACKS: dict[str, tuple[bool, dict[str, Any], int]] = {
    "128 choices": (False, {**_LONG, "n": 128, "max_tokens": 300}, 2),
    "128 choices, keys": (True, {**_LONG, "n": 128, "max_tokens": 300}, 2),
    "128 prompts": (
        False,
        {"prompt": ["What colours are there?"] * 128, "max_tokens": 300, "ignore_eos": True},
        2,
    ),
    "70 long streams, keys": (True, {**_LONG, "stream": True}, 70),
    "200 long streams, keys": (True, {**_LONG, "stream": True}, 200),
}


class Clients:
    """Those of one deployment."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def ask(self, key: str, body: dict[str, Any]) -> int:
        """The status of an answer that was read to its end; 0: it broke off."""
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with self._session.post(self._url + path, json=body, headers=headers) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def watch(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
        """Ask as the modest client does; its waits and statuses."""
        end_s, waits_ms, statuses = clock() + seconds, [], Counter[int]()
        while clock() < end_s:
            start_s = clock()
            status = await self.ask("modest", _MODEST)
            statuses[status] += 1
            if status == 200:
                waits_ms.append(1e3 * (clock() - start_s))
            await asyncio.sleep(0.05)
        return {
            "answers": statuses.total(),
            "refused": statuses.total() - statuses[200],
            "median_ms": round(sorted(waits_ms)[len(waits_ms) // 2], 1) if waits_ms else None,
            "p99_ms": p99(waits_ms),
        }

    async def attack(self, body: dict[str, Any], number: int) -> None:
        async def again() -> None:
            while True:
                if await self.ask("greedy", body) != 200:
                    await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(again())


async def run(name: str, seconds: float) -> dict[str, Any]:
    has_keys, body, number = ATTACKS[name]
    keys = [{"name": key, "hash": hash_key(key)} for key in ("greedy", "modest")] if has_keys else []
    config = DeploymentConfig(
        topology="E-P-D", gateway={"port": 0, "api_keys": keys}, instances={"base_port": 0, "threads": 1}
    )
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        LocalDeployment(config, ready_timeout_s=300) as deployment,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        clients = Clients(deployment.gateway_url, session)
        await clients.watch(2)
        alone = await clients.watch(5)
        attack = asyncio.create_task(clients.attack(body, number))
        await asyncio.sleep(3)
        beside = await clients.watch(seconds)
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        await asyncio.sleep(1)
    return {"alone": alone, "beside": beside}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.attacks:
        results[name] = asyncio.run(run(name, options.seconds))
        print(f"{name:26s} {results[name]}", flush=True)
    if options.output is not None:
        command = "python -m benchmarks.hostile_neighbours"
        record = {"command": command, "machine": machine(), "attacks": results}
        write(options.output, record)


if __name__ == "__main__":
    main()
