"""The controller at work on real processes: decode is late, an encoder becomes a decoder, no answer notices."""

from __future__ import annotations

import asyncio
import socket

import httpx
from fleet import Books

from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_a_late_decode_gets_an_encoder_and_every_answer_stays_right() -> None:
    """With one place in a step and six clients, decode is late on any machine."""
    admin = f"http://127.0.0.1:{(port := free_port())}"
    config = DeploymentConfig.model_validate(
        {
            "topology": "2E-P-D",
            "gateway": {"port": 0, "admin": {"port": port}},
            "slo": {"ttft_ms": 400, "tpot_ms": 60000},
            "instances": {"base_port": 0, "threads": 1, "queue_timeout_s": 120, "num_blocks": 512},
            "roles": {"D": {"max_num_seqs": 1}},
            "elastic": {"enabled": True, "interval_s": 0.1, "hold_s": 0.3, "window_s": 2, "cooldown_s": 1},
        }
    )
    body = {
        "model": "demo",
        "prompt": "The red circle is",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }
    texts: set[str] = set()
    has_switched = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        while not has_switched.is_set():
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])

    async def watch(client: httpx.AsyncClient) -> None:
        async with asyncio.timeout(120):
            while not has_switched.is_set():
                instances = (await client.get(f"{admin}/instances")).json()["instances"]
                if any(one["role"] == "D" and one["ready"] and one["name"] != "d0" for one in instances):
                    has_switched.set()
                await asyncio.sleep(0.1)

    async with (
        LocalDeployment(config, ready_timeout_s=120) as deployment,
        httpx.AsyncClient(base_url=deployment.gateway_url, timeout=120, trust_env=False) as client,
    ):
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(ask(client))
            group.create_task(watch(client))
        has_switched.clear()
        again = await client.post("/v1/completions", json=body)
        texts.add(again.json()["choices"][0]["text"])
        decisions = (await client.get(f"{admin}/elastic")).json()["decisions"]
        await Books({name: one.url for name, one in deployment.instances.items()}).check()
    orders = [one for one in decisions if one["order"] is not None]
    assert orders[0]["order"]["role"] == "D"
    assert orders[0]["reason"].startswith("decode is at ")
    assert len(texts) == 1
