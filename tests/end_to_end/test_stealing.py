"""Work stealing between real instances of unequal speed: every answer is the one that it would be without."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import psutil
import tiny_models
from chat import chat
from fleet import Books, gateway
from pictures import noise

from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment

MAX_TOKENS = 12
FIELDS = {
    "model": "model",
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logprobs": True,
}
#: One sequence a step, so that a queue forms; the other instance steals and is niced.
INSTANCES = {"base_port": 0, "threads": 1, "block_size": 8, "max_num_seqs": 1}


def bodies(stream: bool) -> list[dict[str, object]]:
    pictures = [noise(seed, (90, 90)) for seed in range(4)]
    return [
        chat(f"Question {number}: what is this?", *pictures[number % 4 : number % 4 + number % 2], stream=stream)
        | FIELDS
        for number in range(24)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, object]) -> list[str]:
    """The tokens of an answer, streamed or not."""
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [
            bytes(token["bytes"]).decode(errors="replace")
            for token in answer.json()["choices"][0]["logprobs"]["content"]
        ]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    return [
        bytes(token["bytes"]).decode(errors="replace")
        for choice in choices
        for token in (choice["logprobs"] or {"content": []})["content"]
    ]


async def stolen(url: str) -> float:
    async with httpx.AsyncClient(timeout=150) as client:
        text = (await client.get(f"{url}/metrics")).text
    name = "epd_serve_requests_stolen_total "
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


async def test_what_an_idle_encoder_steals_is_answered_as_it_would_be_elsewhere(tmp_path: Path) -> None:
    config = DeploymentConfig(
        topology="EPD-PD",
        model=str(tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")),
        dtype="float32",
        gateway={"port": 0},
        instances=INSTANCES,
        roles={"EPD": {"steals": True, "max_num_seqs": 4}},
    )
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        psutil.Process(deployment.instances["epd0"].pid).nice(19)

        async def answers(threshold: int, num_rounds: int) -> list[list[list[str]]]:
            """The answers of each round; where something is to be stolen, rounds go on until it was."""
            found: list[list[list[str]]] = []
            rule = {"gateway": {"stealing": {"threshold": threshold, "batch": 4}}}
            async with gateway(urls, config=rule) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
                while len(found) < num_rounds and not await stolen(url):
                    for is_stream in (False, True):
                        found.append(await asyncio.gather(*(ask(client, body) for body in bodies(is_stream))))
                assert (await stolen(url) > 0) == (threshold == 2)
            await Books(urls).check()
            return found

        expected, *others = await answers(1 << 20, 2)
        assert all(len(tokens) == MAX_TOKENS for tokens in expected)
        assert len(set(map(tuple, expected))) > 4, "the answers differ"
        for tokens in (*others, *await answers(2, 20)):
            assert tokens == expected
