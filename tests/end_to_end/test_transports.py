"""Features and KV over TCP, and one layer at a time: the answers are those of shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from chat import chat
from fleet import Books
from pictures import noise
from reference import Reference

from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment


@pytest.mark.parametrize(
    "settings",
    [{"transport": "tcp", "group_layers": 1}, {"transport": "shm", "group_layers": 2}],
    ids=["tcp", "shm"],
)
async def test_the_path_of_the_bytes_changes_no_token(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(path)
    images = [noise(1), noise(2, (60, 140))]
    expected = reference.generate("What is this?", images, max_tokens=12)
    config = DeploymentConfig(
        topology="E-P-D",
        model=str(path),
        served_model_name="demo",
        dtype="float32",
        gateway={"port": 0},
        instances={
            "base_port": 0,
            "threads": 1,
            "max_num_batched_tokens": 20,
            "block_size": 8,
            "kv_transfer": settings,
        },
    )
    body = chat("What is this?", *images, max_tokens=12, ignore_eos=True, logprobs=True, skip_special_tokens=False)
    async with LocalDeployment(config, ready_timeout_s=120) as deployment:
        async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=60) as client:
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens = [token["token"] for token in answer.json()["choices"][0]["logprobs"]["content"]]
        assert tokens == [reference.tokenizer.decode([i]) for i in expected]
        await Books({name: handle.url for name, handle in deployment.instances.items()}).check()
