"""Images of one request on several encoders: each is its own, and they stay in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import tiny_models
from chat import chat
from fleet import Books, figures
from http_client import http_client
from pictures import noise
from PIL import Image
from reference import Reference
from tiny_service import token_texts

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

TEXT, MAX_TOKENS = "What is in the pictures?", 8
SIZES = [(60, 140), (90, 90), (140, 60), (120, 90), (90, 90)]


def orders(seed: int) -> list[list[Image.Image]]:
    """Pictures in one order, in its reverse, and in one in which a picture comes twice."""
    pictures = [noise(seed + index, size) for index, size in enumerate(SIZES)]
    return [pictures, pictures[::-1], [pictures[2], *pictures[:3], pictures[2]]]


async def test_images_of_a_request_are_encoded_in_several_places_and_stay_in_order(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(model)
    asked = orders(100)
    expected = [
        [reference.tokenizer.decode([token]) for token in reference.generate(TEXT, order, max_tokens=MAX_TOKENS)]
        for order in asked
    ]
    assert len(set(map(tuple, expected))) == 3, "the model tells the pictures and their places apart"
    config = DeploymentConfig(
        topology="3E-P-D",
        model=str(model),
        dtype="float32",
        gateway={"port": 0},
        instances={"base_port": 0, "threads": 1},
    )
    fields = {
        "model": "model",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": True,
    }
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        encoders = [url for name, url in urls.items() if name.startswith("e")]

        async def num_encoded() -> list[float]:
            """Counted before a feature leaves."""
            return [(await figures(url))["tower_images_total"] for url in encoders]

        async with http_client(deployment.gateway_url) as client:
            before = await num_encoded()
            bodies = [chat(TEXT, *order, **fields) for order in asked]
            first = await client.post("/v1/chat/completions", json=bodies[0])
            shares = [now - then for then, now in zip(before, await num_encoded(), strict=True)]
            assert sum(shares) == len(SIZES)
            assert sum(share > 0 for share in shares) > 1
            others = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies[1:]))
            for answer, tokens in zip([first, *others], expected, strict=True):
                assert token_texts(answer) == tokens
        await Books(urls).check()
