"""However KV moves and whenever features are fetched: the same answers, and faults leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
import tiny_models
from chat import chat
from fleet import Books, deployed, figures
from http_client import http_client
from identity import token_texts
from pictures import noise
from reference import Reference

#: Others hold shared memory (test_identity) and TCP (test_tls) against known answers each time.
pytestmark = pytest.mark.slow

#: One way each, over one of the paths of the bytes and in groups of each kind.
WAYS = {
    "grouped-tcp": {"transport": "tcp", "group_layers": 1},
    "grouped-shm": {"transport": "shm", "group_layers": 2},
    "layerwise": {},
    "oneshot": {},
}
BASELINES = {"layerwise": {"kv": "layerwise"}, "oneshot": {"kv": "oneshot", "prefetch": "sync"}}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = tiny_models.make_tiny_model(request.param, tmp_path_factory.mktemp("ways") / "model")
    return path, Reference(path)


@pytest.mark.parametrize("way", WAYS)
async def test_the_way_of_the_kv_changes_no_token_and_leaves_nothing_behind(
    model: tuple[Path, Reference], way: str
) -> None:
    """The link is slow; test_link_faults has its faults."""
    path, reference = model
    images = [noise(1), noise(2, (60, 140))]
    expected = reference.generate("What is this?", images, max_tokens=12)
    settings = {"lease_s": 10, "max_num_batched_tokens": 20, "kv_transfer": WAYS[way]}
    baselines = BASELINES.get(way, {}) | {"bandwidth": "2MB/s", "latency_ms": 5}
    fields = {"model": "tested", "max_tokens": 12, "ignore_eos": True}
    body = chat("What is this?", *images, **fields, logprobs=True, skip_special_tokens=False)
    async with (
        deployed("E-P-D", path, restart="never", instances=settings, baselines=baselines) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        for answer in [await client.post("/v1/chat/completions", json=body) for _ in range(2)]:
            assert token_texts(answer) == [reference.tokenizer.decode([i]) for i in expected]
        await Books(urls).check()
        of_p, of_d = await figures(urls["p0"]), await figures(urls["d0"])
        assert of_p["kv_requests_total"] == 2
        assert of_p["feature_transmission_seconds_count"] == 2, "each image crosses once"
        assert of_d["kv_bytes_total"] > 0
        num_groups = 4 if "qwen3_5" in (path / "config.json").read_text() else 2
        assert (of_p["kv_announcements_total"] == num_groups) == (way == "oneshot"), (
            "one for a prompt, one for a state"
        )


async def test_a_prompt_of_a_stalled_instance_ends() -> None:
    """P is stopped while D reads: D gives its blocks back, and P throws its work away when it goes on."""
    slow = {"bandwidth": "1MB/s"}
    async with deployed("E-P-D", restart="never", instances={"lease_s": 2}, baselines=slow) as deployment:
        handles = deployment.instances
        async with http_client(deployment.gateway_url) as client:
            for number in range(0, 8, 2):  # where this process is held up, D has read all before it looks
                bodies = [chat(f"{number + i} " + "apple " * 200, max_tokens=8, ignore_eos=True) for i in range(2)]
                asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in bodies]
                is_reserved = False
                while not (is_reserved or all(task.done() for task in asked)):
                    is_reserved = await _is_reserved(client, handles["d0"].url)
                if is_reserved:
                    break
            assert is_reserved
            os.kill(handles["p0"].pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(150):
                    while await _is_reserved(client, handles["d0"].url):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            finally:
                os.kill(handles["p0"].pid, signal.SIGCONT)
            await asyncio.wait_for(asyncio.gather(*asked), 300)
        await Books.of(deployment).check()


async def _is_reserved(client: httpx.AsyncClient, url: str) -> bool:
    return bool((await client.get(f"{url}/integrity")).json()["reservations"])
