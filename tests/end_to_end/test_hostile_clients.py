"""Input that is wrong, or small and costs much, and clients that leave: nobody else notices, nothing is held."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from chat import chat
from fleet import Books, deployed
from http_client import http_client
from pictures import noise

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[LocalDeployment]:
    async with deployed(
        "E-P-D",
        gateway={"max_in_flight": 10},  # of the 24 that come at once: the others wait, and some leave then
        # few blocks and a small store, so that requests wait for each other at every stage
        instances={"kv_cache_bytes": 80 << 15, "max_num_batched_tokens": 64, "feature_cache_bytes": 1 << 18},
    ) as deployment:
        yield deployment
        await Books.of(deployment).check()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / 100


async def answers_beside(
    client: httpx.AsyncClient, body: Callable[[], Any], work: Awaitable[httpx.Response]
) -> tuple[httpx.Response, list[httpx.Response]]:
    """The results of ``work``, and of a neighbour who asks one after the other until then."""
    task, others = asyncio.ensure_future(work), list[httpx.Response]()
    while not task.done() or not others:
        others.append(await client.post("/v1/chat/completions", json=body()))
    return await task, others


def peak_bytes(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


LONG = "a" * 8_000_000
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}
LONG_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": ("/v1/chat/completions", chat(LONG)),
    "prompts": ("/v1/completions", {"model": "demo", "prompt": [LONG[: len(LONG) // 4]] * 4}),
    "a tool": ("/v1/chat/completions", chat("Hi") | {"tools": [TOOL]}),
}


@contextmanager
def little_use(pid: int, nbytes: int) -> Iterator[None]:
    """Within, a process uses little memory and time; it takes 10 s to tokenise 8 MB."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # forget the peak
    before, spent_s = peak_bytes(pid), cpu_s(pid)
    yield
    assert peak_bytes(pid) - before < 4 * nbytes + (256 << 20)
    assert cpu_s(pid) - spent_s < 6


@pytest.mark.parametrize("name", LONG_REQUESTS)
async def test_a_prompt_of_megabytes_is_refused_unread(deployment: LocalDeployment, name: str) -> None:
    path, body = LONG_REQUESTS[name]
    data = json.dumps(body).encode()
    async with http_client(deployment.gateway_url) as client:
        with little_use(deployment.instances["p0"].pid, len(data)):
            hostile, others = await answers_beside(
                client,
                lambda: chat("Count to 9.", max_tokens=3),
                client.post(path, content=data, headers={"content-type": "application/json"}),
            )
        error = hostile.json()["error"]
        assert hostile.status_code == 400 and error["code"] == "context_length_exceeded", error
        assert [other.status_code for other in others] == [200] * len(others)


@pytest.mark.parametrize("headers", [{"origin": "null"}, {"host": "evil.example"}], ids=str)
async def test_no_web_page_gives_orders_to_an_instance(
    deployment: LocalDeployment, headers: dict[str, str]
) -> None:
    """One byte is a whole order to leave: a page could have a browser send it."""
    async with http_client() as client:
        for handle in deployment.instances.values():
            for path in ("/leave", "/role"):
                answer = await client.post(handle.url + path, content=b"\x80", headers=headers)
                assert answer.status_code == 403 and answer.json()["error"]["code"] == "cross_site"
                assert (await client.post(handle.url + path, content=b"\x80")).status_code == 404, "not over HTTP"
            assert (await client.get(f"{handle.url}/info", headers=headers)).status_code == 403


NUM_REQUESTS = 36


def random_body(rng: random.Random) -> dict[str, Any]:
    images = [noise(rng.randrange(12), (96, 72)) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "ignore_eos": True, "stream": rng.random() < 0.6}
    if rng.random() < 0.2:
        fields["n"] = rng.randint(2, 3)
    return chat(f"What is number {rng.randrange(50)}? " + "apple " * rng.randrange(40), *images, **fields)


async def test_requests_that_are_cancelled_at_random_leak_nothing(deployment: LocalDeployment) -> None:
    rng = random.Random(20)
    outcomes: list[str] = []
    async with http_client(deployment.gateway_url) as client:
        slots = asyncio.Semaphore(24)

        async def one(request: dict[str, Any], patience_s: float | None) -> None:
            async with slots:
                try:
                    async with asyncio.timeout(patience_s):
                        answer = await client.post("/v1/chat/completions", json=request)
                except TimeoutError:
                    outcomes.append("cancelled")
                    return
                assert answer.status_code == 200, answer.text
                if request["stream"]:
                    assert answer.text.endswith("data: [DONE]\n\n")
                outcomes.append("answered")

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_REQUESTS):
                patience_s = rng.choice([None, None, rng.uniform(0, 0.05), rng.uniform(0, 0.5), rng.uniform(0, 2)])
                group.create_task(one(random_body(rng), patience_s))
        await Books.of(deployment).check()
        assert len(outcomes) == NUM_REQUESTS
        assert outcomes.count("cancelled") > NUM_REQUESTS // 10
        assert outcomes.count("answered") > NUM_REQUESTS // 4
        async with asyncio.timeout(300):
            while True:  # the gateway's own books of who left may follow those of the instances
                lines = (await client.get("/metrics")).text.splitlines()
                samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
                if not any(float(samples[f"epd_serve_num_requests_{state}"]) for state in ("running", "waiting")):
                    break
                await asyncio.sleep(0.05)
        assert float(samples["epd_serve_request_queue_time_seconds_count"]) > NUM_REQUESTS // 10
        last = await client.post("/v1/chat/completions", json=chat("Say apple"))
        assert last.status_code == 200
