"""A profile over HTTP: of a server whose steps take known times, and of what is no vLLM server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse
from servers import served
from typer.testing import CliRunner

from device.datasheets import DEVICE_SPECS
from epd_serve.cli.app import app
from epd_serve.cost.profile import Profile
from epd_serve.profiling import endpoint
from epd_serve.profiling.endpoint import profile_endpoint

REQUEST_S, TOKEN_S, STEP_S, SEQUENCE_S, IMAGE_S = 0.02, 2e-4, 0.01, 0.002, 0.03
NUM_BLOCKS, BLOCK = 64, 16


METRICS = f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{NUM_BLOCKS}"}} 1.0\n'


def timed(metrics: str = METRICS) -> Any:
    """A server of the known times; a word is a token, an image none."""
    app, running = FastAPI(), [0]

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "m", "max_model_len": 256}]}

    @app.get("/version")
    def version() -> dict[str, str]:
        return {"version": "0.0"}

    @app.get("/metrics")
    def figures() -> PlainTextResponse:
        return PlainTextResponse(metrics)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        asked = await request.json()
        content = asked["messages"][0]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        num_tokens = sum(len(one["text"].split()) for one in parts if one["type"] == "text")
        images = sum(one["type"] != "text" for one in parts)

        async def events() -> AsyncIterator[str]:
            running[0] += 1
            seconds = REQUEST_S + STEP_S + SEQUENCE_S + TOKEN_S * num_tokens + IMAGE_S * images
            for left in reversed(range(asked["max_tokens"])):
                await asyncio.sleep(seconds)
                seconds = STEP_S + SEQUENCE_S * running[0]
                choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None if left else "length"}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            running[0] -= 1
            usage = {"prompt_tokens": num_tokens, "completion_tokens": asked["max_tokens"]}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))


async def profiled(server: uvicorn.Server) -> Profile:
    async with served(server) as url:
        return await asyncio.to_thread(profile_endpoint, url, "qwen2.5-vl-7b", "h100")


@pytest.mark.slow
async def test_known_times_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, values in {
        "PROMPTS": (16, 64, 160),
        "DECODES": (1, 4),
        "CONTEXTS": (8,),
        "SIDES": (64, 128),
        "NUM_REQUESTS": 3,
        "_DECODE_OUTPUT": 12,
    }.items():
        monkeypatch.setattr(endpoint, name, values)
    profile = await profiled(timed())
    file = tmp_path / "vllm.json"
    file.write_bytes(profile.to_json())
    assert Profile.read(file) == profile
    assert (profile.kind, profile.device, profile.software["vllm"]) == ("measured", "h100", "0.0")
    assert profile.step_s(1, 1, 100) == pytest.approx(STEP_S + SEQUENCE_S, rel=0.4)
    assert profile.step_s(4, 4, 400) == pytest.approx(STEP_S + 4 * SEQUENCE_S, rel=0.4)
    longer_s = profile.step_s(160, 1, 0, 160**2) - profile.step_s(16, 1, 0, 16**2)
    assert longer_s == pytest.approx(144 * TOKEN_S, rel=0.4)
    assert profile.encode_s([128**2]) == pytest.approx(IMAGE_S, rel=0.4)
    assert profile.num_blocks(BLOCK, share=1.0, holds_tower=True) == NUM_BLOCKS
    assert set(profile.residuals) == {"encode", "prefill", "decode"}
    assert profile.link_bytes_per_s == DEVICE_SPECS["h100"].link_bytes_per_s


def test_options_that_a_server_decides_are_refused(tmp_path: Path) -> None:
    given = ["--model", "qwen2.5-vl-7b", "--endpoint", "http://127.0.0.1:9", "--threads", "2"]
    result = CliRunner().invoke(app, ["profile", str(tmp_path / "vllm.json"), *given])
    assert "--threads" in str(result.exception)


async def test_another_server_is_refused() -> None:
    with pytest.raises(ValueError, match="/metrics lacks vllm:cache_config_info"):
        await profiled(timed(metrics="up 1\n"))
    with pytest.raises(ValueError, match=r"--endpoint http://127\.0\.0\.1:9: /v1/models: .*refused"):
        profile_endpoint("http://127.0.0.1:9", "qwen2.5-vl-7b", "h100")
