"""One deployment for all tests of the API, answered by real instances of tiny models."""

from __future__ import annotations

from collections.abc import AsyncIterator

import in_process
import openai
import pytest
import pytest_asyncio
import tiny_models
from http_client import http_client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[in_process.Deployment]:
    """EP-D of a random Qwen2.5-VL."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("api") / "model")
    async with in_process.deployment(model, "EP", "D") as running:
        yield running
        await running.settle()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def thinker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[in_process.Deployment]:
    """EP-D of a random Qwen3.5, whose template thinks and calls tools as XML."""
    model = tiny_models.make_tiny_model("qwen3_5", tmp_path_factory.mktemp("thinker") / "model", thinks=True)
    async with in_process.deployment(model, "EP", "D") as running:
        yield running
        await running.settle()


@pytest_asyncio.fixture(loop_scope="session")
async def client(api: in_process.Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    options = {"api_key": "none", "max_retries": 0, "http_client": http_client()}
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", **options) as made:
        yield made
