"""Kill any process at any time: the answer is right or a clear error, and the survivors hold nothing after it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest
from chat import chat
from fleet import Books, deployed, figures, until_decoding
from http_client import http_client
from pictures import noise


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Returns "right", "error" (a clear one, before any token) or "cut" (broken off after an error event)."""
    if not body.get("stream"):
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["finish_reason"]
            return "right"
        assert answer.status_code in (429, 502, 503, 504), answer.text
        assert answer.json()["error"]["message"]
        return "error"
    text = ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
    except httpx.RemoteProtocolError:
        assert '"error"' in text, "a stream was cut without saying why"
        assert "[DONE]" not in text
        return "cut"
    if answer.status_code != 200:
        assert "message" in text
        return "error"
    assert text.endswith("data: [DONE]\n\n"), "a stream ended in order and is not complete"
    return "right"


@pytest.mark.parametrize("victim", ["e0", pytest.param("d0", marks=pytest.mark.slow)])
async def test_kill_an_instance_under_load(victim: str) -> None:
    seen = chat("What is in the picture?", noise(7), max_tokens=12, ignore_eos=True)
    instances = {"lease_s": 6, "feature_timeout_s": 8, "max_num_batched_tokens": 64}
    async with (
        deployed("E-P-D", restart="never", instances=instances) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        handles = deployment.instances
        before = await client.post("/v1/chat/completions", json=seen)
        bodies = [
            chat(
                f"What is number {i}?",
                *([noise(i, (96, 72))] if i % 2 else []),
                max_tokens=150,
                ignore_eos=True,
                stream=i % 3 > 0,
            )
            for i in range(24)
        ]
        for _ in range(3):  # where this process is held up, all have been answered when it looks
            asked = [asyncio.create_task(ask(client, body)) for body in bodies]
            if is_decoding := await until_decoding(handles["d0"].url, *asked):
                break
        assert is_decoding
        os.kill(handles[victim].pid, signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*asked), 300)
        assert len(outcomes) == 24
        survivors = {name: handle.url for name, handle in handles.items() if name != victim}
        await Books(survivors).check()
        async with asyncio.timeout(150):  # whoever had nothing to do when it died is missed a little later
            while (await client.get("/health")).status_code != (200 if victim == "e0" else 503):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        text = await client.post("/v1/chat/completions", json=chat("Say apple"))
        image = await client.post("/v1/chat/completions", json=chat("What is this?", noise(99), max_tokens=4))
        if victim == "e0":
            assert set(outcomes) == {"right"}, "text needs no encoder, and the prefill instance encodes itself"
            assert text.status_code == image.status_code == 200
            after = await client.post("/v1/chat/completions", json=seen)
            assert before.json()["choices"] == after.json()["choices"]
            assert (await figures(handles["p0"].url))["feature_recomputes_total"] > 0
        else:
            assert text.status_code == image.status_code == 503
