"""The checks of videos and sounds against a native model that takes both."""

from __future__ import annotations

from pathlib import Path

import in_process
import pytest
import tiny_models

from epd_serve.verify.client import Client
from epd_serve.verify.runner import chosen, run_checks

NAMES = ("answers.videos", "answers.sounds", "answers.logprobs", "answers.stop", "media.clips")


@pytest.mark.slow
async def test_videos_and_sounds_give_no_alarm(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_omni", tmp_path / "model")
    async with in_process.deployment(model, "EP", "D") as running:
        client = Client(running.url, slowness=3)
        report = await run_checks(client, chosen((), NAMES), tmp_path)
        await client.close()
    assert {one.check: one.outcome for one in report.results} == dict.fromkeys(NAMES, "pass"), report.results
