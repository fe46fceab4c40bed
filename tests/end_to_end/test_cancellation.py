"""Mixed requests with random cancellations over E-P-D: afterwards nothing is held anywhere."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from chat import chat
from fleet import Books, deployed
from http_client import http_client
from pictures import noise

NUM_REQUESTS = 36


def body(rng: random.Random) -> dict[str, Any]:
    images = [noise(rng.randrange(12), (96, 72)) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "ignore_eos": True, "stream": rng.random() < 0.6}
    if rng.random() < 0.2:
        fields["n"] = rng.randint(2, 3)
    return chat(f"What is number {rng.randrange(50)}? " + "apple " * rng.randrange(40), *images, **fields)


async def test_no_block_and_no_feature_leaks() -> None:
    rng = random.Random(20)
    outcomes: list[str] = []
    async with (
        deployed(
            "E-P-D",
            gateway={"max_in_flight": 10},  # of the 24 that come at once: the others wait, and some leave then
            # few blocks and a small store, so that requests wait for each other at every stage
            instances={"kv_cache_bytes": 80 << 15, "max_num_batched_tokens": 64, "feature_cache_bytes": 1 << 18},
        ) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
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
                group.create_task(one(body(rng), patience_s))
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
