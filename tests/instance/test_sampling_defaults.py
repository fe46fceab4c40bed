"""A model's generation_config.json over real sockets: what a request leaves open, and what it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from in_process import deployment

from epd_serve.demo import weights_dir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The built-in model with defaults that everyone would notice."""
    path = tmp_path / "demo"
    shutil.copytree(weights_dir(), path)
    file = path / "generation_config.json"
    values = json.loads(file.read_text()) | {"temperature": 1.5, "top_k": 1, "max_new_tokens": 6}
    file.write_text(json.dumps(values))
    return path


async def test_requests_are_sampled_as_the_model_says_where_they_do_not(model: Path) -> None:
    async with deployment(model, "P", "D") as served:

        async def answer(**fields: Any) -> tuple[str, int]:
            body = {"messages": [{"role": "user", "content": "hello there, who are you?"}], **fields}
            status, reply = await served.post("/v1/chat/completions", body)
            assert status == 200, reply
            return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]

        greedy, _ = await answer(temperature=0)
        assert {(await answer(seed=seed))[0] for seed in range(8)} == {greedy}, "top_k is 1"
        assert {(await answer(seed=seed, top_k=0))[0] for seed in range(8)} != {greedy}, "what it sets is its own"
        assert (await answer(ignore_eos=True))[1] == 6
        assert (await answer(ignore_eos=True, max_tokens=50))[1] == 6, "no request gets more"
        assert (await answer(ignore_eos=True, max_tokens=3))[1] == 3
        await served.settle()
