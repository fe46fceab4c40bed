"""Images of one request on several encoders: each is its own, and they stay in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import tiny_models
from chat import chat
from fleet import Books, figures, gateway
from pictures import noise
from reference import Reference

from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment

TEXT, MAX_TOKENS = "What is in the pictures?", 8
PICTURES = [
    noise(seed, size) for seed, size in enumerate([(60, 140), (90, 90), (140, 60), (120, 90), (90, 90)], 1)
]
#: One order, its reverse, and one in which a picture comes twice.
ORDERS = [PICTURES, PICTURES[::-1], [PICTURES[2], *PICTURES[:3], PICTURES[2]]]


async def test_images_of_a_request_are_encoded_in_several_places_and_stay_in_order(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(model)
    expected = [
        [reference.tokenizer.decode([token]) for token in reference.generate(TEXT, order, max_tokens=MAX_TOKENS)]
        for order in ORDERS
    ]
    assert len(set(map(tuple, expected))) == len(ORDERS), "the model tells the pictures and their places apart"
    config = DeploymentConfig(
        topology="3E-P-D",
        model=str(model),
        dtype="float32",
        gateway={"port": 0},
        instances={"base_port": 0, "threads": 1, "block_size": 8},
    )
    fields = {
        "model": "model",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": True,
    }
    async with LocalDeployment(config, ready_timeout_s=150) as deployment:
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        encoders = [url for name, url in urls.items() if name.startswith("e")]

        async def num_encodes() -> list[float]:
            return [(await figures(url))["encodes_total"] for url in encoders]

        for is_parallel in (True, False):
            config = {"gateway": {"parallel_encode": is_parallel}}
            async with gateway(urls, config=config) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
                before = await num_encodes()
                bodies = [chat(TEXT, *order, **fields) for order in ORDERS]
                first = await client.post("/v1/chat/completions", json=bodies[0])
                shares = [now - then for then, now in zip(before, await num_encodes(), strict=True)]
                if is_parallel:
                    assert max(shares) <= 2 and sum(shares) == len(PICTURES)
                else:
                    assert sorted(shares) == [0, 0, len(PICTURES)]
                others = await asyncio.gather(
                    *(client.post("/v1/chat/completions", json=body) for body in bodies[1:])
                )
                for answer, tokens in zip([first, *others], expected, strict=True):
                    assert answer.status_code == 200, answer.text
                    content = answer.json()["choices"][0]["logprobs"]["content"]
                    assert [token["token"] for token in content] == tokens
        await Books(urls).check()
