"""An instance over several devices is whole or gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
import tiny_models
from chat import chat
from fleet import until_decoding, wait_until

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment


@pytest_asyncio.fixture
async def wide(tmp_path: Path) -> AsyncIterator[LocalDeployment]:
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    config = DeploymentConfig(
        topology="EPD@tp2",
        restart="never",
        model=str(path),
        served_model_name="demo",
        gateway={"port": 0, "failover": {"wait_s": 0.5}},
        instances={"base_port": 0, "threads": 1},
    )
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        yield deployment


@pytest.mark.parametrize("victim", [pytest.param("leader", marks=pytest.mark.slow), "follower"])
async def test_an_instance_is_whole_or_gone(wide: LocalDeployment, victim: str) -> None:
    """A rank that dies takes the others along, and the client is told before any deadline."""
    leader = psutil.Process(wide.instances["epd0"].pid)
    (follower,) = [child for child in leader.children() if "follower" in " ".join(child.cmdline())]
    async with httpx.AsyncClient(base_url=wide.gateway_url, timeout=150) as client:
        body = chat("What is number 1?", max_tokens=900, ignore_eos=True)
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        assert await until_decoding(wide.instances["epd0"].url, asked)
        os.kill((leader if victim == "leader" else follower).pid, signal.SIGKILL)
        answer = await asked
    assert answer.status_code in (502, 503)
    assert answer.json()["error"]["message"]
    wait_until(lambda: not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE, "no rank")
    assert await asyncio.wait_for(wide.wait_failure(), 300)
