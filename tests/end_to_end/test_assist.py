"""An encoder with ``assist`` takes texts while the others' queue is long (HeteroServe, algorithm 1)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import tiny_models
from fleet import Books, figures, gateway
from http_client import http_client
from identity import QUESTIONS, Question, answer_whole, start_fleet

from epd_serve.routing.routes import ASSIST_THRESHOLD

NUM_ROUNDS = 20


async def test_an_encoder_assists_and_tokens_are_those_of_generate(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    roles = {"EPD": {"assist": True}, "PD": {"max_num_seqs": 2}}
    async with (
        start_fleet(path, "EPD-PD", roles=roles) as fleet,
        gateway(fleet.urls) as url,
        http_client(url) as client,
    ):
        one_by_one = [await answer_whole(client, one.body(stream=False, ignore_eos=True)) for one in QUESTIONS]
        assert one_by_one == [fleet.expected[question] for question in QUESTIONS]
        assert not (await figures(fleet.urls["epd0"]))["steps_total"], "the queue is short"
        texts = [question for question in QUESTIONS if not question.images]
        bodies = {question: question.body(stream=False, ignore_eos=True) for question in QUESTIONS}

        def ask(asked: Sequence[Question]) -> list[asyncio.Task[list[int]]]:
            return [asyncio.create_task(answer_whole(client, bodies[question])) for question in asked]

        for _ in range(5):  # while the encoder's last report shows an encode, it takes no text
            waiting = ask(NUM_ROUNDS * texts)
            while (await figures(fleet.urls["pd0"]))["num_waiting"] <= ASSIST_THRESHOLD:
                assert not all(one.done() for one in waiting), "the queue was never long"
            asked = [*texts, *QUESTIONS]
            answers = await asyncio.gather(*waiting, *ask(asked))
            assert answers == [fleet.expected[question] for question in (*(NUM_ROUNDS * texts), *asked)]
            if (await figures(fleet.urls["epd0"]))["steps_total"]:
                break
        await Books(fleet.urls).check()
        assert (await figures(fleet.urls["epd0"]))["steps_total"] > 0
        assert not (await figures(fleet.urls["pd0"]))["tower_images_total"]
