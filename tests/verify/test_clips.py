"""All checks but faults against a native model that takes pictures, videos and sounds."""

from __future__ import annotations

from pathlib import Path

import in_process
import pytest
import tiny_models

from epd_serve.verify.client import Client
from epd_serve.verify.runner import chosen, run_checks


@pytest.mark.slow
async def test_our_own_deployment_gives_no_alarm(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_omni", tmp_path / "model")
    async with in_process.deployment(model, "EP", "D") as running:
        client = Client(running.url, slowness=3)
        report = await run_checks(client, chosen(("api", "answers", "media")), tmp_path)
        await client.close()
    found = {one.check: one.outcome for one in report.results}
    assert [one for one in report.results if one.outcome == "fail"] == []
    passed = {"answers.videos", "answers.sounds", "answers.logprobs", "answers.stop", "media.clips", "api.stream"}
    assert {found[name] for name in passed} == {"pass"}
