"""Requests that contradict themselves, or explode in the grammar engine, fail alone and by their own fault."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from typing import Any

import aiohttp
from in_process import Deployment, deployment

from epd_serve.demo import weights_dir

MESSAGES = [{"role": "user", "content": "hello"}]


def of_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, **more}


def wrong(number: int) -> list[dict[str, Any]]:
    """Fields of requests that cannot be followed; those of each number are others."""
    patterns = [f"^(.*{i % 7}.*){{{i % 5 + 3}}}{i}{number}$" for i in range(40)]
    return [
        of_schema({"enum": ["p"]}, bad_words=["p"], seed=number),
        of_schema({"enum": [["p", number]]}, bad_words=["p"]),
        {"structured_outputs": {"choice": ["p"]}, "bad_words": ["p"], "seed": number},
        {"structured_outputs": {"regex": f"(?:a?){{{300 + number}}}a{{{300 + number}}}"}},
        {"structured_outputs": {"regex": f"(a|aa|aaa|aaaa){{{200 + number}}}"}},
        of_schema({"anyOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}),
        {"logit_bias": {str(10**6 + number): 5}},
    ]


async def refused(here: Deployment, fields: dict[str, Any], *, stream: bool) -> None:
    """Ask, and see the request itself refused, at once or behind its first token."""
    body = {"messages": MESSAGES, "max_tokens": 20, "stream": stream, **fields}
    async with here.session.post(f"{here.url}/v1/chat/completions", json=body) as response:
        pieces: list[bytes] = []
        with contextlib.suppress(aiohttp.ClientPayloadError):  # a stream is cut off behind its error
            async for piece in response.content.iter_any():
                pieces.append(piece)
        text = b"".join(pieces).decode()
        assert stream or response.status == 400, text
    last = text if response.status == 400 else text.strip().rpartition("\n\n")[2].removeprefix("data: ")
    assert json.loads(last)["error"]["type"] == "invalid_request_error"


async def test_wrong_requests_of_many_connections_leave_others_alone() -> None:
    async with deployment(weights_dir(), "P", "D") as here, asyncio.timeout(300):

        async def attack(number: int) -> None:
            for fields, stream in itertools.product(wrong(number), (False, True)):
                await refused(here, fields, stream=stream)

        waits_s: dict[str, list[float]] = {"plain": [], "structured": []}
        async with asyncio.TaskGroup() as attacks:
            tasks = [attacks.create_task(attack(number)) for number in range(3)]
            for seed in itertools.count():
                structured = {"max_tokens": 9, **of_schema({"anyOf": [{"const": seed}]})}
                for kind, fields in (("plain", {"max_tokens": 2, "seed": seed}), ("structured", structured)):
                    start_s = time.monotonic()
                    status, answer = await here.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
                    assert status == 200, answer
                    waits_s[kind].append(time.monotonic() - start_s)
                if all(task.done() for task in tasks):
                    break
        assert max(map(statistics.median, waits_s.values())) < 5
        assert all(record.state == "up" for record in here.app.state.gateway.fleet.table)
        async with here.session.get(f"{here.url}/metrics") as response:
            metrics = (await response.text()).splitlines()
        assert not any(
            float(line.split()[-1]) for line in metrics if line.startswith("epd_serve_request_retries_total")
        )
        await here.settle(60)
