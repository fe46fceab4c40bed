"""A stream of several choices whose decode instance dies: its client gets what it would have got without that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
from chat import chat
from fleet import Books

from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment


async def stream(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> tuple[list[str], Any]:
    """The text of each choice and the usage; ``begun`` is set once each has some."""
    texts, usage = [""] * body["n"], None
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.removeprefix("data: [DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"]["content"]
            if all(len(text) > 5 for text in texts):
                begun.set()
    return texts, usage


async def test_each_choice_goes_on_at_another_decode_instance() -> None:
    config = DeploymentConfig(
        topology="P-3D", restart="never", gateway={"port": 0}, instances={"base_port": 0, "threads": 1}
    )
    async with (
        LocalDeployment(config, ready_timeout_s=240) as deployment,
        httpx.AsyncClient(base_url=deployment.gateway_url, timeout=240) as client,
    ):
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        for number, temperature in enumerate((0.0, 1.2), start=1):
            body = chat("Count to 9.", max_tokens=200, ignore_eos=True, stream=True, temperature=temperature)
            body |= {"n": 3, "seed": 7, "stream_options": {"include_usage": True}}
            whole = await stream(client, body, asyncio.Event())
            assert len(whole[0]) == 3 and whole[1]["completion_tokens"] == 600
            await Books(urls).check()
            begun = asyncio.Event()
            asked = asyncio.create_task(stream(client, body, begun))
            await begun.wait()
            blocks = {name: (await client.get(f"{url}/integrity")).json()["blocks"] for name, url in urls.items()}
            [busy] = [name for name, in_use in blocks.items() if in_use and name != "p0"]
            os.kill(deployment.instances[busy].pid, signal.SIGKILL)
            del urls[busy]
            assert await asked == whole
            await Books(urls).check()
            metrics = (await client.get("/metrics")).text
            assert f"epd_serve_request_continuations_total {number}.0" in metrics
