"""One deployment of the built-in model for all that is seen of requests."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import in_process
import pytest
import pytest_asyncio
from PIL import Image

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import hash_key

KEY = "sk-observed"


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.jsonl"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def observed(log: Path) -> AsyncIterator[in_process.Deployment]:
    """E-P-D behind an API key, with an access log."""
    model = Path(__file__).parents[2] / "epd_serve" / "demo" / "weights"
    keys = (ApiKeyConfig(name="alice", hash=hash_key(KEY)),)
    async with in_process.deployment(model, "E", "P", "D", access_log=str(log), api_keys=keys) as running:
        running.session.headers["authorization"] = f"Bearer {KEY}"
        yield running
        await running.settle()


def picture(colour: str) -> dict[str, Any]:
    """A content part."""
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture
def ask(observed: in_process.Deployment) -> Any:
    """``await ask(*colours, **fields)`` → the whole answer and its headers."""

    async def send(*colours: str, headers: dict[str, str] | None = None, **fields: Any) -> tuple[bytes, Any]:
        content = [*map(picture, colours), {"type": "text", "text": "What is it?"}]
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "ignore_eos": True, **fields}
        url = observed.url + "/v1/chat/completions"
        async with observed.session.post(url, json=body, headers=headers) as response:
            answer = await response.read()
            assert response.status == 200, answer
            return answer, response.headers

    return send
