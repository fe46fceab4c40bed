"""An encoder with ``assist`` takes texts while the others' queue is long (HeteroServe, algorithm 1)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import tiny_models
from fleet import Books, figures, gateway
from http_client import http_client
from identity import QUESTIONS, Question, answer_whole, start_fleet

from epd_serve.routing.routes import ASSIST_THRESHOLD


async def test_an_encoder_assists_and_tokens_are_those_of_generate(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    texts = [question for question in QUESTIONS if not question.images]
    bodies = {question: question.body(stream=False, ignore_eos=True) for question in QUESTIONS}
    async with (
        start_fleet(path, "EPD-PD", roles={"EPD": {"assist": True}}) as fleet,
        gateway(fleet.urls) as url,
        http_client(url) as client,
    ):

        async def check(asked: Sequence[Question]) -> None:
            answers = await asyncio.gather(*(answer_whole(client, bodies[question]) for question in asked))
            assert answers == [fleet.expected[question] for question in asked]

        for question in QUESTIONS:
            await check([question])
        encoder = fleet.urls["epd0"]
        assert not (await figures(encoder))["steps_total"], "the queue is short"
        pid = fleet.deployment.instances["pd0"].pid
        os.kill(pid, signal.SIGSTOP)  # so that the texts queue there
        asked = asyncio.create_task(check(texts * (ASSIST_THRESHOLD // len(texts) + 1)))
        try:
            async with asyncio.timeout(60):
                while not (await figures(encoder))["steps_total"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(asked, check(QUESTIONS))
        await Books(fleet.urls).check()
        assert not (await figures(fleet.urls["pd0"]))["tower_images_total"]
