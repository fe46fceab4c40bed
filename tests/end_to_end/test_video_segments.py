"""The frames of one video on several encoders: the tokens of one encoder, when one of them dies as well."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny_models
from clips import Clip, clip
from fleet import Books, figures, gateway
from http_client import http_client
from identity import Fleet, Question
from reference import Reference
from tiny_service import expected, serving, token_texts

from epd_serve.routing import encoders

KINDS = ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_5_vl", "gemma4"))]


@pytest.fixture(autouse=True)
def _split_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Videos of tests are so short that it would not pay."""
    monkeypatch.setattr(encoders, "_CALL_S", float("-inf"))
    yield


async def num_encoded(urls: dict[str, str]) -> dict[str, float]:
    return {name: (await figures(url))["tower_images_total"] for name, url in urls.items() if name[0] == "e"}


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_equal_generate_over_two_and_three_encoders(kind: str, tmp_path: Path) -> None:
    """Whole and streamed, beside a text; each segment is encoded once. Gemma's file takes two frames: the third
    encoder has none, as what the gateway knows of it is about."""
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    reference = Reference(path)
    questions = [Question("What happens?", videos=(Clip(clip(seed, 24, (96, 64), fps=6)),)) for seed in (1, 2)]
    text = Question("Say apple")
    answers = {one: expected(reference, one) for one in (text, *questions)}
    del reference
    async with serving(path, "3E-P-D", max_num_batched_tokens=200) as deployment:
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        for count, question in zip((2, 3), questions, strict=True):
            names = [f"e{number}" for number in range(count)]
            before = await num_encoded(urls)
            fleet = Fleet(deployment, {one: answers[one] for one in (text, question)}, ignore_eos=True)
            await fleet.check_tokens([*names, "p0", "d0"])
            after = await num_encoded(urls)
            shares = [after[name] - before[name] for name in after]
            assert sum(shares) == (min(count, 2) if kind == "gemma4" else count)
            assert sum(share > 0 for share in shares) >= 2  # where one is slow, another may take two


@pytest.mark.slow
async def test_a_client_leaves_and_an_encoder_dies_in_a_segment(tmp_path: Path) -> None:
    """Nothing is held of the first request; the second has the same answer as without the death."""
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    left, question = (
        Question("What happens?", videos=(Clip(clip(seed, 24, (96, 64), fps=6)),)) for seed in (8, 9)
    )
    answer = expected(Reference(path), question)
    async with serving(path, "2E-P-D", max_num_batched_tokens=200, feature_timeout_s=60) as deployment:
        urls = {name: handle.url for name, handle in deployment.instances.items()}
        async with gateway(urls) as url, http_client(url) as client:
            pid = deployment.instances["e0"].pid

            async def half_encoded(asked: Question) -> asyncio.Task[httpx.Response]:
                """The first encoder has its segment and cannot end it, the second has ended the other."""
                [before] = (await num_encoded({"e1": urls["e1"]})).values()
                os.kill(pid, signal.SIGSTOP)
                body = asked.body(stream=False, ignore_eos=True)
                task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
                async with asyncio.timeout(60):
                    while True:
                        if (await num_encoded({"e1": urls["e1"]}))["e1"] > before:
                            break
                        await asyncio.sleep(0.02)
                assert not task.done()
                return task

            task = await half_encoded(left)
            task.cancel()
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
            await Books(urls).check()
            async with asyncio.timeout(60):
                while True:
                    metrics = (await client.get("/metrics")).text
                    if not re.search(r"^epd_serve_in_flight_calls[{].* [^0]", metrics, re.M):
                        break
                    await asyncio.sleep(0.05)
            task = await half_encoded(question)
            os.kill(pid, signal.SIGKILL)
            assert token_texts(await task) == answer
        await Books({name: one for name, one in urls.items() if name != "e0"}).check()
