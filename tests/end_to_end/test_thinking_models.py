"""Models like Qwen3.5, that think and call tools as XML: greedy float32 tokens equal ``generate``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from chat import chat
from fleet import Books, deployed, gateway
from http_client import http_client
from pictures import noise
from PIL import Image
from reference import Reference

pytestmark = pytest.mark.slow

TOPOLOGIES = {"P-D": ("p0", "d0"), "EPD": ("epd0",), "E-P-D": ("e0", "p0", "d0"), "E-PD": ("e0", "pd0")}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
#: Text, pictures, whether it thinks, whether there are tools.
ASKED: list[tuple[str, tuple[Image.Image, ...], bool, bool]] = [
    ("Say apple", (), True, False),
    ("What is 2 + 3? " * 9, (), False, True),
    ("What is this?", (noise(1),), True, True),
    ("What is in the picture?", (noise(2, (60, 140)), noise(3, (90, 90))), False, False),
]
NUM_TOKENS = 12


def body_of(text: str, images: tuple[Image.Image, ...], thinks: bool, with_tools: bool) -> dict[str, Any]:
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": "none"} if with_tools else {}
    template = {"chat_template_kwargs": {"enable_thinking": thinks}}
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return chat(text, *images, model="tested", **tools, **template, **fields)


async def ids_of(client: httpx.AsyncClient, number: int) -> list[int]:
    """The tokens of an answer; every other one is streamed."""
    body = {**body_of(*ASKED[number]), "stream": number % 2 == 0}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = lines if body["stream"] else [answer.text]
    return [token for part in parts for token in json.loads(part)["choices"][0]["token_ids"]]


@pytest.mark.parametrize("kind", tiny_models.STATE_KINDS)
async def test_tokens_equal_generate_in_each_topology(kind: str, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model(kind, tmp_path / kind, thinks=True)
    reference, expected = Reference(path), []
    for text, images, thinks, with_tools in ASKED:
        template = {"enable_thinking": thinks, "tools": [TOOL] if with_tools else None}
        expected.append(reference.generate(text, images, max_tokens=NUM_TOKENS, **template))
        assert len(set(expected[-1])) >= 5, "tokens that say little of the model"
    async with deployed("E-P-D-PD-EPD", path, instances={"max_num_batched_tokens": 13}) as deployment:
        for topology, names in TOPOLOGIES.items():
            urls = {name: deployment.instances[name].url for name in names}
            numbers = [number for number, one in enumerate(ASKED) if topology != "P-D" or not one[1]]
            config = {"gateway": {"probe_timeout_s": 60}}
            async with gateway(urls, config=config) as url, http_client(url) as client:
                answers = await asyncio.gather(*(ids_of(client, number) for number in numbers))
            assert answers == [expected[number] for number in numbers], topology
            await Books(urls).check()
