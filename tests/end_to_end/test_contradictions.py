"""Requests that contradict themselves, or explode in the grammar engine, fail alone and by their own fault."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any

import aiohttp
from in_process import Deployment, deployment

from epd_serve.demo import weights_dir

MESSAGES = [{"role": "user", "content": "hello"}]


def of_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, **more}


WRONG: list[dict[str, Any]] = [
    of_schema({"enum": ["p"]}, bad_words=["p"]),
    of_schema({"type": "object", "properties": {"a": {"const": "p"}}, "required": ["a"]}, bad_words=["p"]),
    {"structured_outputs": {"choice": ["p"]}, "bad_words": ["p"]},
    {"structured_outputs": {"regex": "(?:a?){300}a{300}"}},
    {"structured_outputs": {"regex": "(a|aa|aaa|aaaa){200}"}},
    of_schema({"anyOf": [{"type": "string", "pattern": f"^(.*{i % 7}.*){{{i % 5 + 3}}}{i}$"} for i in range(40)]}),
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
    health = {"probe_interval_s": None, "max_failures": 1}
    async with deployment(weights_dir(), "P", "D", health=health) as here, asyncio.timeout(500):

        async def attack(number: int) -> None:
            for fields, stream in itertools.product(WRONG, (False, True)):
                await refused(here, {**fields, "seed": number}, stream=stream)

        await attack(0)
        async with asyncio.TaskGroup() as attacks:
            tasks = [attacks.create_task(attack(number)) for number in range(20)]
            num_answered = 0
            while num_answered < 20 or not all(task.done() for task in tasks):
                body = {"messages": MESSAGES, "max_tokens": 2, "seed": num_answered}
                status, answer = await here.post("/v1/chat/completions", body)
                assert status == 200, answer
                num_answered += 1
        for name in here.instances:
            assert here.app.state.health.describe(name)["breaker"] == "closed"
        async with here.session.get(f"{here.url}/metrics") as response:
            metrics = await response.text()
        assert not any(float(line.split()[-1]) for line in metrics.splitlines() if "retries_total" in line)
        await here.settle(60)


async def test_what_only_seems_to_contradict_itself_is_answered() -> None:
    async with deployment(weights_dir(), "P", "D") as here, asyncio.timeout(300):
        for fields, text in (
            (of_schema({"enum": ["p"]}, logit_bias={str(i): -100 for i in range(4000)}), '"p"'),
            (of_schema({"enum": ["p", "q"]}, bad_words=["q"]), '"p"'),
            ({"structured_outputs": {"choice": ["p"]}, "bad_words": ["x"]}, "p"),
        ):
            status, answer = await here.post(
                "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, **fields}
            )
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"] == text
